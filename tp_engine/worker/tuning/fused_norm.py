"""The trial of all-reduces with a norm behind them (``distributed/fused_norm.py``), by all ranks together.

::

    every rank    parts of all ranks, random, the same everywhere -> the exact result, in float64
                  proof: 1 row, 3 rows, the most           error against that of all-reduce and norm; equal bits
                  times: rounds, of which the slowest rank counts -> one choice by ``rule.fastest``, which is kept

A trial of a collective cannot run in a process of its own, as others do: a rank that is late stops all of them.  So
each part has a deadline, which ends the start and names the remedy.  Ranks fail together: a fault is told to all before
the next part begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec
import torch

from tp_engine.distributed.collectives import AddNorm
from tp_engine.distributed.fused_norm import FUSED_NORMS, FusedKind, FusedNorm, FusedSizes
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.rank import Agreeing, attempt
from tp_engine.distributed.reduce_plan import ALIGNMENT
from tp_engine.distributed.symmetric_memory import SymmetricCommunicator
from tp_engine.kernels.candidates import Choices, key_of
from tp_engine.kernels.layer_ops import NormRule, norm
from tp_engine.kernels.ops import op
from tp_engine.system.log import get_logger
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.tuning.rule import ROUNDS, fastest
from tp_engine.worker.tuning.start import device_facts
from tp_engine.worker.tuning.table import Store, digest_of, sources_digest, write_whole

logger = get_logger(__name__)

Found = TypeVar("Found")

APART = "all-reduce, then norm"
_NAME = "all_reduce_norm"
_ROUNDING = 2.0**-20
_CALLS = 20
_SOURCES = ("kernels/distributed/*.py", "kernels/norm_triton.py", "distributed/fused_norm.py")
_TIMED_ROWS = (4, 16, 64)
_LIMIT_S = 60.0
_REMEDY = "the GPUs do not answer each other; start with --tune off, or with --all-reduce-backend nccl"

Repeat: TypeAlias = Callable[[Callable[[], object]], Callable[[], object]]
"""Makes of a call one that does the same many times: a graph on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTrial:
    """What a trial has: the ranks, the model's sizes, and ``add_norm`` for the norm by itself.

    ``wait`` waits for the device; ``within`` bounds a part's time, and ``repeat`` repeats what is timed.
    """

    communicator: SymmetricCommunicator
    host: Agreeing
    device: torch.device
    sizes: FusedSizes
    kept: KeptChoice
    add_norm: AddNorm
    wait: Callable[[], None]
    within: Callable[[str], AbstractContextManager[object]]
    repeat: Repeat

    def draw(self, num_rows: int, seed: int) -> Example:
        """Return random rows, of which every rank knows all."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        shape = num_rows, self.sizes.size
        drawn = [
            torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
            for size in (*([shape] * self.sizes.world_size), shape, shape[1:])
        ]
        *parts, residual, weight = (one.to(self.device, self.sizes.dtype) for one in drawn)
        return Example(parts, residual, NormRule(weight, 1e-6))

    def run(self, fused: FusedNorm | None, example: Example) -> list[torch.Tensor]:
        """Return the normed rows and the stream, by ``fused`` or apart."""
        part, residual = example.parts[self.sizes.rank].clone(), example.residual.clone()
        if fused is None:
            out = self.add_norm(self.communicator.all_reduce(part), residual, example.rule, 1.0, 1.0)
        else:
            out = fused(part, residual, example.rule, 1.0, 1.0)
        return [out, residual]


@dataclass(frozen=True, slots=True)
class Example:
    """Each rank's part, the stream, and the norm."""

    parts: list[torch.Tensor]
    residual: torch.Tensor
    rule: NormRule

    def exact(self) -> list[torch.Tensor]:
        """Return what ``FusedTrial.run`` does, in float64."""
        stream = torch.stack([part.double() for part in self.parts]).sum(0) + self.residual.double()
        return [norm(stream, NormRule(self.rule.weight.double(), self.rule.eps)), stream]


def try_fused_norm(
    effective: EffectiveConfig, groups: RankGroups, device: torch.device, wait: Callable[[], None]
) -> Choices:
    """Choose for the model of ``effective``, if its ranks share memory and ``--tune`` asks for it; a collective.
    Return all choices, this one among them."""
    communicator, dtype, size = groups.communicator, effective.dtype, effective.model.hidden_size
    if effective.config.tune == "off" or not isinstance(communicator, SymmetricCommunicator):
        return effective.choices
    row_bytes = size * dtype.itemsize
    max_rows = 0 if row_bytes % ALIGNMENT else communicator.plan.one_shot_bytes // row_bytes
    if max_rows:
        info, group = groups.info, groups.device_group
        sizes = FusedSizes(
            rank=info.rank, world_size=info.world_size, group=group, max_rows=max_rows, size=size, dtype=dtype
        )
        chosen = choose_fused_norm(
            FusedTrial(
                communicator=communicator,
                host=groups.host,
                device=device,
                sizes=sizes,
                kept=KeptChoice(device, sizes),
                add_norm=op("add_norm", device.type),
                wait=wait,
                within=lambda what: groups.time_limit(what, _REMEDY, _LIMIT_S),
                repeat=in_a_graph,
            )
        )
        if chosen != APART:
            shape: dict[str, int | str] = {"ranks": info.world_size, "size": size, "type": str(dtype)}
            return effective.choices.beside(key_of(_NAME, shape), ((communicator.fused_bytes // row_bytes, chosen),))
    return effective.choices


class KeptChoice:
    """What was chosen on such devices for such sizes, in the cache of kernels: two starts choose alike."""

    def __init__(self, device: torch.device, sizes: FusedSizes) -> None:
        shape = {"ranks": sizes.world_size, "rows": sizes.max_rows, "size": sizes.size, "type": str(sizes.dtype)}
        key = {**device_facts(device), **{name: str(value) for name, value in shape.items()}}
        folder = Store({}).folder
        self._path = folder / f"{digest_of({**key, 'sources': sources_digest(_SOURCES)})}.json"

    def read(self) -> bytes:
        """Return what is known; nothing if nothing is, or if the file is not whole."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.encode(msgspec.json.decode(self._path.read_bytes(), type=tuple[str, int]))
        return b""

    def write(self, choice: bytes) -> None:
        """Keep it, where the folder can be written to."""
        with contextlib.suppress(OSError):
            write_whole(self._path, choice)


def choose_fused_norm(trial: FusedTrial, kinds: dict[str, FusedKind] = FUSED_NORMS) -> str:
    """Let the communicator take the fastest kernel that is right; return its name, or ``APART``.  A collective."""
    right: dict[str, FusedNorm] = {}
    for name, kind in kinds.items():
        if (obstacle := kind.why_not(trial.sizes)) is not None:
            logger.debug("no all-reduce with a norm by %s: %s", name, obstacle)
            continue
        made = _together(trial, name, partial(kind.make, trial.sizes, trial.communicator.buffer))
        if made is None:
            continue
        proven = _together(trial, name, partial(_prove, trial, made))
        if proven is not None and len(set(trial.host.all_gather_bytes(proven))) > 1:
            _refuse(trial, name, "the ranks' results differ")
        elif proven is not None:
            right[name] = made
    if not right:
        return APART
    (known, *_) = trial.host.all_gather_bytes(trial.kept.read() if trial.host.info.is_first else b"")
    chosen, num_rows = msgspec.json.decode(known, type=tuple[str, int]) if known else (APART, 0)
    if chosen not in (APART, *right) or not known:
        chosen, num_rows = _fastest(trial, right)
        if trial.host.info.is_first:
            trial.kept.write(msgspec.json.encode((chosen, num_rows)))
    if chosen != APART:
        trial.communicator.fused_norm = right[chosen]
        trial.communicator.fused_bytes = num_rows * trial.sizes.size * trial.sizes.dtype.itemsize
        if trial.host.info.is_first:
            logger.info("all-reduces of up to %d rows and the norms behind them are one kernel: %s", num_rows, chosen)
    return chosen


def _fastest(trial: FusedTrial, right: dict[str, FusedNorm]) -> tuple[str, int]:
    """Return the fastest of ``right`` for one row, and up to how many rows it is; a collective."""
    most, chosen, largest = trial.sizes.max_rows, APART, 0
    for num_rows in sorted({1, most, *(rows for rows in _TIMED_ROWS if rows < most)}):
        with trial.within("timing an all-reduce with a norm"):
            times = _time(trial, right, num_rows)
        found = fastest(times, APART) if times else APART
        if found == APART or chosen not in (APART, found):
            break
        chosen, largest = found, num_rows
    return chosen, largest


def _together(trial: FusedTrial, name: str, body: Callable[[], Found]) -> Found | None:
    """Return what ``body`` does within the deadline; None on every rank if it fails on one."""
    with trial.within(f"proving an all-reduce with a norm ({name})"):
        found, _, failed = attempt(trial.host, body)
    if failed:
        rank, text = next(iter(failed.items()))
        _refuse(trial, name, f"rank {rank}: {text}")
        return None
    return found


def _refuse(trial: FusedTrial, name: str, reason: str) -> None:
    if trial.host.info.is_first:
        logger.warning("all-reduces and norms stay apart, because %s failed here: %s", name, reason)


def _prove(trial: FusedTrial, fused: FusedNorm) -> bytes:
    """Return a digest of all results; ``ValueError``, when all ranks have run everything, if one is wrong."""
    digest, wrong = hashlib.sha256(), []
    for seed, num_rows in enumerate((1, min(3, trial.sizes.max_rows), trial.sizes.max_rows)):
        example = trial.draw(num_rows, seed)
        plain, found, again = (trial.run(one, example) for one in (None, fused, fused))
        trial.wait()
        for own, other, repeated, wide in zip(found, plain, again, example.exact(), strict=True):
            error, bound = _rms(own - wide), 2 * _rms(other - wide) + _ROUNDING * _rms(wide)
            if not error <= bound:  # nor if it is no number
                wrong.append(f"its error is {error:.3g} with {num_rows} rows, where {bound:.3g} is allowed")
            if not torch.equal(own, repeated):
                wrong.append(f"two calls with {num_rows} rows differ")
            digest.update(own.cpu().view(torch.uint8).numpy().tobytes())
    if wrong:
        raise ValueError(wrong[0])
    return digest.digest()


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _time(trial: FusedTrial, right: dict[str, FusedNorm], num_rows: int) -> dict[str, list[float]]:
    """Return the seconds of each round of each way; of the ranks' times the longest, the same on every rank."""
    example = trial.draw(num_rows, 0)
    rounds: dict[str, Callable[[], object]] = {}
    for name, fused in {APART: None, **right}.items():
        made = _together(trial, name, partial(trial.repeat, partial(trial.run, fused, example)))
        if made is not None:
            rounds[name] = made
    if APART not in rounds:
        return {}
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for number in range(ROUNDS + 1):  # the first one warms up
        for name in rounds if number % 2 else reversed(rounds):
            trial.wait()
            begun = time.perf_counter()
            rounds[name]()
            trial.wait()
            own = time.perf_counter() - begun
            slowest = max(float(report) for report in trial.host.all_gather_bytes(repr(own).encode()))
            if number:
                times[name].append(slowest)
    return times


def in_a_graph(call: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of many calls, recorded in a CUDA graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return graph.replay
