"""The trial of all-reduces with a norm behind them, on simulated ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tests.unit.distributed.test_symmetric_memory import FakeBuffer, HostOf
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.distributed.fused_norm import FUSED_NORMS, FusedKind, FusedSizes
from tp_engine.distributed.reduce_plan import ReducePlan
from tp_engine.distributed.symmetric_memory import SymmetricCommunicator
from tp_engine.job.progress import RankProgress
from tp_engine.kernels.layer_ops import NormRule, add_norm
from tp_engine.worker.tuning import fused_norm
from tp_engine.worker.tuning.fused_norm import APART, FusedTrial, KeptChoice, choose_fused_norm

SIZE, MOST = 16, 8
ROW_BYTES = SIZE * torch.float32.itemsize
PLAN = ReducePlan(one_shot_bytes=MOST * ROW_BYTES, two_shot_bytes=1 << 20)


class Fused:
    """A stand-in that adds through the simulated ranks; ``fault`` is what is wrong with it."""

    def __init__(self, through: Communicator, fault: str = "") -> None:
        self._through, self._fault, self.calls = through, fault, 0

    def takes(self, rule: NormRule, scale: float, stream_scale: float) -> bool:
        return not rule.is_centred

    def __call__(
        self, part: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float, stream_scale: float, /
    ) -> torch.Tensor:
        self.calls += 1
        total = self._through.all_reduce(part)
        if self._fault == "wrong on rank 1" and self._through.info.rank == 1:
            total *= 1 + 1e-4
        if self._fault == "other bits on rank 1" and self._through.info.rank == 1:
            residual[0, 0] = torch.nextafter(residual[0, 0], torch.tensor(9.0))
        if self._fault == "no number":
            total += float("nan")
        if self._fault == "crashes":
            raise RuntimeError("an illegal instruction")
        return add_norm(total, residual, rule, scale, stream_scale)


def make_fused(library: Communicator, fault: str, *_: object) -> Fused:
    """A row's ``make``."""
    return Fused(library, fault)


class Memory(KeptChoice):
    """What is kept, without a file."""

    def __init__(self) -> None:
        self.content = b""

    def read(self) -> bytes:
        return self.content

    def write(self, choice: bytes) -> None:
        self.content = choice


def trial_of(library: Communicator, communicator: SymmetricCommunicator, kept: Any = None) -> FusedTrial:
    """Of float32 rows on CPUs."""
    info = library.info
    sizes = FusedSizes(
        rank=info.rank, world_size=info.world_size, group=None, max_rows=MOST, size=SIZE, dtype=torch.float32
    )
    return FusedTrial(
        communicator=communicator,
        host=HostOf(library),
        device=torch.device("cpu"),
        sizes=sizes,
        kept=Memory() if kept is None else kept,
        add_norm=add_norm,
        wait=lambda: None,
        within=lambda _what: nullcontext(),
        repeat=lambda call: call,
    )


def choose(faults: dict[str, str], times: Callable[..., Any]) -> list[tuple[str, int]]:
    """What each of two ranks takes, and up to which bytes; ``faults``: those of each candidate."""

    def body(library: Communicator) -> tuple[str, int]:
        communicator = SymmetricCommunicator(library, FakeBuffer(library), PLAN, RankProgress())
        kinds = {
            name: FusedKind(why_not=lambda _: None, make=partial(make_fused, library, fault))
            for name, fault in faults.items()
        }
        return choose_fused_norm(trial_of(library, communicator), kinds), communicator.fused_bytes

    with patch.object(fused_norm, "_time", times):
        return run_ranks(2, body)


def paces(**seconds: float) -> Callable[..., Any]:
    """Times of ten equal rounds, 1.0 for what is apart."""

    def times(trial: FusedTrial, right: dict[str, Any], num_rows: int) -> dict[str, list[float]]:
        return {APART: [1.0] * 10, **{name: [seconds[name]] * 10 for name in right}}

    return times


def test_the_fastest_right_one_is_taken() -> None:
    """Oracle: the rule: the fastest of two, one that is 2 % faster not, of equal ones the first."""
    right = {"one": "", "other": ""}
    assert choose(right, paces(one=0.9, other=0.7)) == [("other", MOST * ROW_BYTES)] * 2
    assert choose(right, paces(one=0.7, other=0.7)) == [("one", MOST * ROW_BYTES)] * 2
    assert choose(right, paces(one=0.98, other=1.1)) == [(APART, 0)] * 2


@pytest.mark.parametrize("fault", ["wrong on rank 1", "other bits on rank 1", "no number", "crashes"])
def test_a_wrong_one_is_not_taken(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: it is the fastest, refused by name on every rank, and the one behind it is taken."""
    assert choose({"wrong": fault, "right": ""}, paces(wrong=0.1, right=0.5)) == [("right", MOST * ROW_BYTES)] * 2
    assert "because wrong failed here" in caplog.text
    assert choose({"wrong": fault}, paces(wrong=0.1)) == [(APART, 0)] * 2


def test_it_is_taken_as_far_as_it_is_faster() -> None:
    """Oracle: faster up to 4 rows, slower at 8."""

    def times(trial: FusedTrial, right: dict[str, Any], num_rows: int) -> dict[str, list[float]]:
        return {APART: [1.0] * 10, "one": [0.5 if num_rows <= 4 else 1.5] * 10}

    assert choose({"one": ""}, times) == [("one", 4 * ROW_BYTES)] * 2


def test_a_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the second start takes the first one's choice without timing; a torn file, or a candidate that is wrong
    by now, is chosen anew."""
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", str(tmp_path))
    num_timed: list[int] = []

    def times(*arguments: Any) -> dict[str, list[float]]:
        num_timed.append(1)
        found: dict[str, list[float]] = paces(one=0.5)(*arguments)
        return found

    def start(fault: str = "") -> list[str]:
        def body(library: Communicator) -> str:
            communicator = SymmetricCommunicator(library, FakeBuffer(library), PLAN, RankProgress())
            trial = trial_of(library, communicator)
            trial = replace(trial, kept=KeptChoice(trial.device, trial.sizes))
            row = FusedKind(why_not=lambda _: None, make=partial(make_fused, library, fault))
            return choose_fused_norm(trial, {"one": row})

        num_timed.clear()
        with patch.object(fused_norm, "_time", times):
            return run_ranks(2, body)

    assert start() == ["one"] * 2 and num_timed
    assert start() == ["one"] * 2 and not num_timed
    assert start("crashes") == [APART] * 2
    (file,) = (tmp_path / "tuned").glob("*.json")
    file.write_bytes(file.read_bytes()[:-2])
    assert start() == ["one"] * 2 and num_timed


def test_the_slowest_rank_counts() -> None:
    """Oracle: each rank has the same times, those of both ways, all of them positive."""

    def body(library: Communicator) -> dict[str, list[float]]:
        communicator = SymmetricCommunicator(library, FakeBuffer(library), PLAN, RankProgress())
        return fused_norm._time(trial_of(library, communicator), {"one": Fused(library)}, 2)

    first, second = run_ranks(2, body)
    assert first == second and set(first) == {APART, "one"} and all(min(own) > 0 for own in first.values())


def test_one_that_cannot_be_recorded_is_not_timed() -> None:
    """Oracle: recording fails on every rank, of one way or of all: no times, and nothing is taken."""

    def body(library: Communicator, can: str) -> tuple[set[str], str]:
        communicator = SymmetricCommunicator(library, FakeBuffer(library), PLAN, RankProgress())
        row = FusedKind(why_not=lambda _: None, make=partial(make_fused, library, ""))

        def repeat(call: Any) -> Any:
            if (call.args[0] is None) != (can == APART):
                raise RuntimeError("operation not permitted when stream is capturing")
            return call

        trial = replace(trial_of(library, communicator), repeat=repeat)
        return set(fused_norm._time(trial, {"one": Fused(library)}, 1)), choose_fused_norm(trial, {"one": row})

    assert run_ranks(2, partial(body, can=APART)) == [({APART}, APART)] * 2
    assert run_ranks(2, partial(body, can="one")) == [(set(), APART)] * 2


def test_the_communicator_takes_it_where_it_can() -> None:
    """Oracle: all-reduce and norm apart, bit by bit; calls are counted: of few rows, but not of many, nor of a norm or
    rows that it does not take."""

    def body(library: Communicator) -> None:
        communicator = SymmetricCommunicator(library, FakeBuffer(library), PLAN, RankProgress())
        fused = communicator.fused_norm = Fused(library)
        communicator.fused_bytes = 4 * ROW_BYTES
        weight = torch.linspace(0.5, 1.5, SIZE)
        for rows, rule, expected in (
            (4, NormRule(weight, 1e-6), 1),
            (5, NormRule(weight, 1e-6), 0),
            (2, NormRule(weight, 1e-6, is_centred=True), 0),
        ):
            part = torch.arange(rows * SIZE, dtype=torch.float32).view(rows, SIZE) + library.info.rank
            streams = [torch.ones(rows, SIZE), torch.ones(rows, SIZE)]
            plain = library.all_reduce_add_norm(part.clone(), streams[0], rule, 1.0, 1.0, add_norm)
            fused.calls = 0
            found = communicator.all_reduce_add_norm(part.clone(), streams[1], rule, 1.0, 1.0, add_norm)
            assert torch.equal(found, plain) and torch.equal(*streams) and fused.calls == expected

    run_ranks(2, body)


def test_flashinfer_s_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a stand-in with the package's own signatures, which adds the residual to twice the part and stores one as
    the norm; without the package, and for other types, the row says why not."""
    sizes = FusedSizes(rank=1, world_size=2, group=None, max_rows=4, size=SIZE, dtype=torch.bfloat16)
    row = FUSED_NORMS["flashinfer"]
    assert "not installed" in str(row.why_not(sizes))

    def create_allreduce_fusion_workspace(
        backend: str = "auto", world_size: Any = None, rank: Any = None, max_token_num: Any = None,
        hidden_dim: Any = None, dtype: Any = None, gpus_per_node: Any = None, comm_backend: Any = None,
        force_oneshot_support: bool = False, group: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        return backend, world_size, rank, max_token_num, hidden_dim, dtype

    def allreduce_fusion(
        input: torch.Tensor, workspace: Any, pattern: int, launch_with_pdl: bool = False,
        trigger_completion_at_end: bool = True, output: Any = None, residual_out: Any = None, norm_out: Any = None,
        quant_out: Any = None, scale_out: Any = None, residual_in: Any = None, rms_gamma: Any = None,
        rms_eps: float = 1e-6, scale_factor: Any = None, layout_code: Any = None, use_oneshot: Any = None,
        fp32_acc: bool = False,
    ) -> None:  # fmt: skip
        assert workspace == ("trtllm", 2, 1, 4, SIZE, torch.bfloat16) and pattern == 1 and use_oneshot and fp32_acc
        residual_out.copy_(residual_in + 2 * input)
        norm_out.copy_(rms_gamma * rms_eps)

    comm = ModuleType("flashinfer.comm")
    comm.__dict__.update(
        allreduce_fusion=allreduce_fusion,
        create_allreduce_fusion_workspace=create_allreduce_fusion_workspace,
        AllReduceFusionPattern=type("AllReduceFusionPattern", (), {"kARResidualRMSNorm": 1}),
    )
    package = ModuleType("flashinfer")
    package.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    package.__dict__["comm"] = comm
    assert row.why_not(sizes) is None and "float32" in str(row.why_not(replace(sizes, dtype=torch.float32)))
    fused = row.make(sizes, FakeBuffer(SingleRank()))
    rule = NormRule(torch.ones(SIZE, dtype=torch.bfloat16), 0.5)
    assert fused.takes(rule, 1.0, 1.0) and not fused.takes(rule, 0.5, 1.0)
    assert not fused.takes(replace(rule, offset=1.0), 1.0, 1.0)
    part, residual = (torch.ones(2, SIZE, dtype=torch.bfloat16) for _ in range(2))
    out = fused(part, residual, rule, 1.0, 1.0)
    assert bool((out == 0.5).all()) and bool((residual == 3).all())
