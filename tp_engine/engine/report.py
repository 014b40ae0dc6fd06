"""Rank 0's report on the whole job: the scheduler, every rank's steps and memory.

``StepStatistics`` makes it from the steps that all ranks record on the job's board, on request; no step pays for it.

::

    rank r    ...step s - 1 done |  plan wait  | received, begun |   step time   | done
    rank q    ....step s - 1 done | | received, begun |<- skew ->|  step time    | done
                                                      |<------->| rank q's collective wait, at least

A step counts once all ranks have ended it.  Before a step without decodes there may have been nothing to do, so only
the time since rank 0 published its plan counts as waiting.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import NUM_RECORDS, RECORD_FIELDS, RankSlot, resident_bytes
from tp_engine.kv_layout import DiskCounters, MoveCounters
from tp_engine.sched.view import SchedulerStats, SchedulerView

#: Upper bounds of the distributions' buckets; a last bucket without a bound follows.
STEP_TIME_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_S = (1e-05, 2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
PLAN_BYTES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1048576)
EXPERT_LOAD = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

Int64s: TypeAlias = npt.NDArray[np.int64]

_NS = 1e-9
_RECENT = 32
_MARGIN = 16  # records that the ranks may overwrite soon
_FIELD = {name: index for index, name in enumerate(RECORD_FIELDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The number of values in each bucket since the start (the last has no upper bound), and their sum."""

    counts: list[int]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """How evenly tokens have gone to experts since the start.  An expert's load is its number of tokens over the mean
    of its layer.  ``num_experts`` counts the experts of all layers by load, in the buckets of ``EXPERT_LOAD``;
    ``largest_load`` is the largest load."""

    num_experts: list[int]
    largest_load: float


def expert_balance(token_counts: Sequence[npt.NDArray[np.int64]]) -> ExpertBalance | None:
    """Return the balance over layers with ``token_counts`` (experts,) each; None if no token has gone to any expert."""
    loads = [counts / counts.mean() for counts in token_counts if counts.any()]
    if not loads:
        return None
    every = np.concatenate(loads)
    places = np.searchsorted(np.array(EXPERT_LOAD), every)
    return ExpertBalance(
        num_experts=np.bincount(places, minlength=len(EXPERT_LOAD) + 1).tolist(), largest_load=float(every.max())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank, from its slot of the job's board; what is on another host is a quarter of a second old.

    ``plan_wait``: seconds from the end of a step to the arrival of the next plan while there was work to do.
    ``step_time``: seconds that steps took on this rank; on GPU ranks other than 0, until all kernels were launched.
    ``collective_wait``: seconds from this rank's begin of a step to the last rank's, which this rank waits at least in
    the step's first collective.  ``collective_s``: seconds in collectives, waits included, if the host does them (CPU).
    ``num_last``: steps that this rank began last.  ``recent_step_s``: times of its last steps, oldest first.
    ``memory``: bytes by line of the ledger (``MEMORY_LINES``).  ``resident_bytes``: the process's host memory now.
    ``startup_s``: seconds by phase of its start.
    """

    rank: int
    pid: int
    state: str
    num_steps: int
    num_last: int
    cpu_s: float
    heartbeat_age_s: float
    collective_s: float
    resident_bytes: int
    memory: dict[str, int]
    plan_wait: Distribution
    step_time: Distribution
    collective_wait: Distribution
    recent_step_s: list[float] = field(default_factory=list)
    startup_s: dict[str, float] = field(default_factory=dict)
    host: int = 0
    host_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The job at one moment.

    ``step_tokens``: tokens per step.  ``plan_bytes``: bytes per plan sent.  ``step_skew``: seconds from the first to
    the last rank's begin of a step (the last two are empty for one rank).  ``num_missed_steps``: steps between two
    reports, beyond the last 512, which are in no distribution.  ``experts`` is None for models without
    experts, ``moves`` and ``disk_moves`` (rank 0's) without such a tier, ``encode_s`` (rank 0's) without a tower.
    """

    stats: SchedulerStats
    ranks: list[RankReport]
    step_tokens: Distribution
    plan_bytes: Distribution
    step_skew: Distribution
    num_missed_steps: int
    experts: ExpertBalance | None = None
    moves: MoveCounters | None = None
    disk_moves: DiskCounters | None = None
    encode_s: float | None = None
    view: SchedulerView | None = None


class StepStatistics:
    """Totals since the start over the steps of all ranks; ``update`` adds the steps since the last call."""

    def __init__(self, board: JobBoard) -> None:
        self._board = board
        self._slots = board.slots
        self._last_counted = 0
        self.num_missed = 0
        self.step_tokens = _Tally(STEP_TOKENS)
        self.plan_bytes = _Tally(PLAN_BYTES)
        self.step_skew = _Tally(WAIT_S)
        self._ranks = [_RankTally() for _ in board.slots]

    def update(self) -> None:
        """Count the steps that every rank has ended and whose records still exist."""
        last = min(slot.step_done for slot in self._slots)
        first = max(self._last_counted + 1, last - NUM_RECORDS + _MARGIN)
        if last < first:
            return
        steps = np.arange(first - 1, last + 1)  # with the step before the first, whose end begins the first wait
        records = np.stack([slot.records[steps % NUM_RECORDS] for slot in self._slots])
        is_there = ((records[:, :, _FIELD["step_id"]] == steps) & (records[:, :, _FIELD["done_ns"]] > 0)).all(axis=0)
        self._count(records, is_there)
        self.num_missed += (last - self._last_counted) - int(is_there[1:].sum())
        self._last_counted = last

    def report(self, stats: SchedulerStats, view: SchedulerView | None, **of_rank: Any) -> EngineReport:
        """Return the job now; ``of_rank`` are the fields that only rank 0's own parts know."""
        self.update()
        return EngineReport(
            stats=stats,
            ranks=self.rank_reports(),
            step_tokens=self.step_tokens.distribution(),
            plan_bytes=self.plan_bytes.distribution(),
            step_skew=self.step_skew.distribution(),
            num_missed_steps=self.num_missed,
            view=view,
            **of_rank,
        )

    def rank_reports(self) -> list[RankReport]:
        """Return one for each rank: steps as of the last ``update``, everything else as of now."""
        now_ns = time.monotonic_ns()
        return [
            _report(slot, tally, now_ns, self._board.topology.host_of(slot.rank), is_far=slot in self._board.far_slots)
            for slot, tally in zip(self._slots, self._ranks, strict=True)
        ]

    def _count(self, records: Int64s, is_there: npt.NDArray[np.bool_]) -> None:
        """``records``: (ranks, steps, fields); the first step is not counted, its end begins the second step's wait."""
        columns = {name: records[:, :, index] for name, index in _FIELD.items()}
        counted, follows = is_there[1:], is_there[:-1]
        started, done, received = (columns[name][:, 1:] for name in ("started_ns", "done_ns", "received_ns"))
        free = np.where(follows, columns["done_ns"][:, :-1], 0)
        is_busy = follows & (columns["decode_rows"][0, 1:] > 0)
        waits = np.maximum(received - np.where(is_busy, free, np.maximum(free, received[0])), 0)
        times = np.maximum(done - np.maximum(started, free), 0)
        self.step_tokens.add((columns["decode_rows"] + columns["prefill_tokens"])[0, 1:][counted])
        for tally, wait, taken in zip(self._ranks, waits[:, counted], times[:, counted], strict=True):
            tally.plan_wait.add(wait * _NS)
            tally.step_time.add(taken * _NS)
            tally.recent.extend((taken[-_RECENT:] * _NS).tolist())
        if len(self._slots) > 1:
            self.plan_bytes.add(columns["plan_bytes"][0, 1:][counted])
            self._count_skew(started[:, counted])

    def _count_skew(self, started: Int64s) -> None:
        leads = started.max(axis=0) - started
        self.step_skew.add(leads.max(axis=0) * _NS)
        num_last = np.bincount(started.argmax(axis=0), minlength=len(self._ranks)).tolist()
        for tally, lead, count in zip(self._ranks, leads, num_last, strict=True):
            tally.collective_wait.add(lead * _NS)
            tally.num_last += count


class _Tally:
    """Values by bucket; ``bounds`` are the buckets' inclusive upper ends."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._total = 0.0

    def add(self, values: npt.NDArray[Any]) -> None:
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._total += float(values.sum())

    def distribution(self) -> Distribution:
        return Distribution(counts=self._counts.tolist(), total=self._total)


class _RankTally:
    """One rank's."""

    def __init__(self) -> None:
        self.plan_wait = _Tally(WAIT_S)
        self.step_time = _Tally(STEP_TIME_S)
        self.collective_wait = _Tally(WAIT_S)
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.num_last = 0


def _report(slot: RankSlot, tally: _RankTally, now_ns: int, host: int, *, is_far: bool) -> RankReport:
    return RankReport(
        rank=slot.rank,
        host=host,
        host_name=slot.host.name,
        pid=slot.pid,
        state=slot.state.name.lower(),
        num_steps=slot.step_done,
        num_last=tally.num_last,
        cpu_s=slot.cpu_ns * _NS,
        heartbeat_age_s=max(0, now_ns - slot.heartbeat_ns) * _NS,
        collective_s=slot.collective_ns * _NS,
        resident_bytes=slot.host.resident_bytes if is_far else resident_bytes(slot.pid),
        memory=slot.memory,
        plan_wait=tally.plan_wait.distribution(),
        step_time=tally.step_time.distribution(),
        collective_wait=tally.collective_wait.distribution(),
        recent_step_s=list(tally.recent),
        startup_s=slot.startup_s,
    )
