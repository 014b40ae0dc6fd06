"""Lives of engines: a disturbed one must give the right tokens; one that ends early must say why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.soak.disturbances import Pauses, random_sleeps
from tests.soak.usage import MIB, Sample, Usage, rank_processes, sample
from tests.soak.workload import Workload, prompt_pool, undisturbed_answers
from tp_engine.config import EngineConfig
from tp_engine.engine.engine import Engine
from tp_engine.engine.start import start_engine
from tp_engine.errors import EngineDeadError, RankError
from tp_engine.features.tiers.feature import STATS
from tp_engine.job.flight_recorder.record import load_record

FAULT_VARIABLE = "TP_ENGINE_FAULT"
NUM_BLOCKS = 40
TIER_GIB = 0.01  # a few hundred slots; small beside what a rank's memory may grow by
SOFT_LIMIT_S, HARD_LIMIT_S = 1.5, 4.0
_LINGER_S = 10.0
_ENDS_WITHIN_S = 20.0


@dataclass
class Soak:
    """Settings and findings of one run."""

    folder: Path
    flight_records: Path
    num_ranks: int
    seed: int
    check_every_s: float
    pool: list[list[int]] = field(init=False)
    reference: list[list[int]] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    between_lives: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.pool = prompt_pool(self.seed)

    def config(self, **changes: object) -> EngineConfig:
        """A configuration in which three long requests fill all blocks, with up to 12 sequences."""
        options: dict[str, object] = {
            "model": str(self.folder),
            "tensor_parallel_size": self.num_ranks,
            "device": "cpu",
            "dtype": "float32",
            "num_gpu_blocks_override": NUM_BLOCKS,
            "max_model_len": 144,
            "max_num_seqs": 12,
            "max_num_batched_tokens": 32,
            "flight_recorder_dir": str(self.flight_records),
        }
        return EngineConfig(**options | changes)  # type: ignore[arg-type]


@contextlib.contextmanager
def engine_life(soak: Soak, fault: str = "", **changes: object) -> Iterator[Engine]:
    """An engine from start to close, with ``fault`` as its TP_ENGINE_FAULT; afterwards no rank may be left."""
    with fault_of_ranks(fault):
        engine = start_engine(soak.config(**changes))
        try:
            yield engine
        finally:
            engine.close()
    soak.count["lives"] += 1
    left = rank_processes()
    assert not left, f"processes left by an engine that was closed: {[process.pid for process in left]}"
    soak.between_lives.append(sample(psutil.Process()))


@contextlib.contextmanager
def fault_of_ranks(fault: str) -> Iterator[None]:
    """Within the block, engines that start have ``fault`` as their TP_ENGINE_FAULT."""
    if fault:
        os.environ[FAULT_VARIABLE] = fault
    try:
        yield
    finally:
        os.environ.pop(FAULT_VARIABLE, None)


def quiet_life(soak: Soak) -> None:
    """Run an undisturbed engine: the first run gives the reference; later runs must give the same tokens."""
    with engine_life(soak) as engine:
        answers = undisturbed_answers(engine, soak.pool)
        check_idle(engine)
    assert not soak.reference or answers == soak.reference, "an undisturbed engine gave other tokens than at first"
    soak.reference = answers


def disturbed_life(soak: Soak, seconds: float, *, least: Counter[str], most_steps: int) -> None:
    """Run random load with pauses and sleeps for ``seconds``, or longer until all of ``least`` has happened; compare
    every answer with known tokens."""
    sleeps = random_sleeps(soak.num_ranks, soak.rng, most_steps=most_steps)
    with engine_life(soak, sleeps, kv_offloading_size=TIER_GIB) as engine:
        load = Workload(engine, soak.pool, soak.rng, soak.reference)
        deadline_s = time.monotonic() + seconds
        others = [psutil.Process(rank.pid) for rank in engine.report().ranks[1:]]
        with Pauses(others, random.Random(soak.seed + 1)) as pauses:
            while time.monotonic() < deadline_s or not load.count >= least:
                _busy(load, time.monotonic() + soak.check_every_s)
                load.finish()
                stats = engine.stats()
                load.count["preemptions"] = stats.num_preemptions
                load.count["stored blocks"] = STATS.of(stats).num_stored_blocks
                load.count["loaded blocks"] = STATS.of(stats).num_loaded_blocks
                with pauses.lock:
                    check_idle(engine)
                    soak.usage.take(load.count["steps"], others)
        soak.count.update(load.count + pauses.count)
        soak.count["recomputed tokens"] += engine.stats().num_recomputed_tokens


def _busy(load: Workload, until_s: float) -> None:
    while time.monotonic() < until_s:
        load.turn()
        check_blocks(load.engine)


def check_blocks(engine: Engine) -> None:
    """Check that every block is free, cached or used."""
    stats = engine.stats()
    found = (stats.num_free_blocks, stats.num_cached_blocks, stats.num_used_blocks)
    assert sum(found) == NUM_BLOCKS, f"free, cached and used blocks are {found}, of {NUM_BLOCKS}"


def check_idle(engine: Engine) -> None:
    """Check an idle engine: no block is used, and all parts of the engine agree."""
    engine.check_integrity()
    check_blocks(engine)
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0), f"not idle: {stats}"


def fatal_life(soak: Soak, kind: str) -> None:
    """Run an engine that loses a rank under load: ``RankError`` names the rank in time, and no request goes on."""
    rank = soak.rng.randrange(1, soak.num_ranks)
    phase, nth = soak.rng.choice((("step_begin", soak.rng.randint(5, 60)), ("move", soak.rng.randint(1, 10))))
    fault = f"{rank}:{phase}@{nth}:{kind}" if kind in ("raise", "exit", "oom") else ""
    limits = {"watchdog_warn_s": SOFT_LIMIT_S, "watchdog_timeout_s": HARD_LIMIT_S}
    with engine_life(soak, fault, kv_offloading_size=TIER_GIB, **limits) as engine:
        load = Workload(engine, soak.pool, soak.rng, soak.reference)
        for _ in range(soak.rng.randint(5, 60)):
            if not fault:
                load.turn()
        struck_s = time.monotonic()
        if not fault:
            rank_processes()[rank - 1].send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        _expect_end(load, rank, kind, struck_s)
    _expect_record(soak, rank)
    soak.count[f"ended by {kind}"] += 1


def _expect_end(load: Workload, rank: int, kind: str, struck_s: float) -> None:
    try:
        while time.monotonic() < struck_s + _ENDS_WITHIN_S + HARD_LIMIT_S:
            load.turn()
    except RankError as error:
        assert error.rank == rank, f"rank {rank} was lost ({kind}), the error names another: {error}"
        took_s = time.monotonic() - struck_s
        assert took_s < _ENDS_WITHIN_S + HARD_LIMIT_S, f"the engine took {took_s:.1f} s to notice"
    else:
        raise AssertionError(f"rank {rank} was lost ({kind}) and the engine runs on")
    try:
        load.turn()
    except EngineDeadError:
        return
    raise AssertionError("an engine that has lost a rank takes another step")


def _expect_record(soak: Soak, rank: int) -> None:
    """Check for one flight record that blames the rank, and delete it."""
    records = {path: load_record(path).culprit for path in soak.flight_records.glob("*.json")}
    assert list(records.values()) == [rank], f"rank {rank} was lost, the flight records blame {records}"
    for path in records:
        path.unlink()


def findings(soak: Soak, violation: str | None, seconds: float) -> dict[str, Any]:
    """The report."""
    return {
        "soak": "passed" if violation is None else "failed",
        "violation": violation,
        "ranks": soak.num_ranks,
        "seed": soak.seed,
        "seconds": round(seconds, 1),
        **{name.replace(" ", "_"): number for name, number in sorted(soak.count.items())},
        "memory": "judged" if soak.usage.rss_growth() else "not judged: too few steps",
        "rss_growth_mib": [round(growth / MIB, 2) for growth in soak.usage.rss_growth()],
        "rss_mib": [round(samples[-1].rss / MIB) for samples in soak.usage.by_rank],
        "descriptors": [samples[-1].descriptors for samples in soak.usage.by_rank],
        "num_samples": len(soak.usage.steps),
        "descriptors_between_lives": [one.descriptors for one in soak.between_lives],
        "threads_between_lives": [one.threads for one in soak.between_lives],
    }


def check_process(soak: Soak) -> None:
    """Check that this process holds no more descriptors or threads than after the first engines ended.

    A library's threads may need a moment to end.
    """
    first, last = soak.between_lives[1], soak.between_lives[-1]
    deadline_s = time.monotonic() + _LINGER_S
    while (last.descriptors > first.descriptors or last.threads > first.threads) and time.monotonic() < deadline_s:
        time.sleep(0.1)
        last = soak.between_lives[-1] = sample(psutil.Process())
    for name in ("descriptors", "threads"):
        found = [getattr(one, name) for one in soak.between_lives]
        assert getattr(last, name) <= getattr(first, name), f"{name} of this process after each life: {found}"
