"""Rank 0's report on the whole job: the scheduler, every rank's steps and memory.

``StepStatistics`` makes it from the steps that all ranks record on the job's board, on request; no step pays for it.

::

    rank r    ...step s - 1 done |  plan wait  | received, begun |   step time   | done
    rank q    ....step s - 1 done | | received, begun |<- skew ->|  step time    | done
                                                      |<------->| rank q's collective wait, at least

A step counts once all ranks have ended it.  Before a step without decodes there may have been nothing to do, so only
the time since rank 0 published its plan counts as waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import NUM_RECORDS, RECORD_FIELDS, resident_bytes
from tp_engine.model_config.kv_layout import DiskCounters, MoveCounters
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
_BOUNDS = {
    "step_tokens": STEP_TOKENS, "plan_bytes": PLAN_BYTES, "step_skew": WAIT_S, "plan_wait": WAIT_S,
    "step_time": STEP_TIME_S, "collective_wait": WAIT_S,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The number of values in each bucket since the start (the last has no upper bound), and their sum."""

    counts: list[int]
    total: float

    def plus(self, bounds: Sequence[float], values: npt.NDArray[Any]) -> Distribution:
        """Return this one with ``values`` besides; ``bounds`` are the buckets' inclusive upper ends."""
        found = np.bincount(np.searchsorted(np.array(bounds), values), minlength=len(self.counts))
        return Distribution(counts=(self.counts + found).tolist(), total=self.total + float(values.sum()))


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
    """Totals since the start over the steps of all ranks; ``update`` adds the steps since the last call.  ``of_job``
    and ``of_rank`` have the distributions by their names in the reports."""

    def __init__(self, board: JobBoard) -> None:
        self._board = board
        self._last_counted = 0
        self.num_missed = 0
        self.of_job = _no_values(("step_tokens", "plan_bytes", "step_skew"))
        self.of_rank = [_no_values(("plan_wait", "step_time", "collective_wait")) for _ in board.slots]
        self._recent: list[deque[float]] = [deque(maxlen=_RECENT) for _ in board.slots]
        self._num_last = np.zeros(len(board.slots), np.int64)

    def update(self) -> None:
        """Count the steps that every rank has ended and whose records still exist."""
        slots = self._board.slots
        last = min(slot.step_done for slot in slots)
        first = max(self._last_counted + 1, last - NUM_RECORDS + _MARGIN)
        if last < first:
            return
        steps = np.arange(first - 1, last + 1)  # with the step before the first, whose end begins the first wait
        records = np.stack([slot.records[steps % NUM_RECORDS] for slot in slots])
        columns = {name: records[:, :, index] for index, name in enumerate(RECORD_FIELDS)}
        is_there = ((columns["step_id"] == steps) & (columns["done_ns"] > 0)).all(axis=0)
        self._count(columns, is_there)
        self.num_missed += (last - self._last_counted) - int(is_there[1:].sum())
        self._last_counted = last

    def report(self, stats: SchedulerStats, view: SchedulerView | None, **of_rank: Any) -> EngineReport:
        """Return the job now; ``of_rank`` are the fields that only rank 0's own parts know."""
        self.update()
        fields: dict[str, Any] = self.of_job | of_rank
        return EngineReport(
            stats=stats, ranks=self.rank_reports(), num_missed_steps=self.num_missed, view=view, **fields
        )

    def rank_reports(self) -> list[RankReport]:
        """Return one for each rank: steps as of the last ``update``, everything else as of now."""
        now_ns, board = time.monotonic_ns(), self._board
        return [
            RankReport(
                rank=slot.rank,
                host=board.topology.host_of(slot.rank),
                host_name=slot.host.name,
                pid=slot.pid,
                state=slot.state.name.lower(),
                num_steps=slot.step_done,
                num_last=int(self._num_last[slot.rank]),
                cpu_s=slot.cpu_ns * _NS,
                heartbeat_age_s=max(0, now_ns - slot.heartbeat_ns) * _NS,
                collective_s=slot.collective_ns * _NS,
                resident_bytes=slot.host.resident_bytes if slot in board.far_slots else resident_bytes(slot.pid),
                memory=slot.memory,
                recent_step_s=list(self._recent[slot.rank]),
                startup_s=slot.startup_s,
                **self.of_rank[slot.rank],
            )
            for slot in board.slots
        ]

    def _count(self, columns: dict[str, Int64s], is_there: npt.NDArray[np.bool_]) -> None:
        """``columns``: (ranks, steps) each; the first step is not counted, its end begins the second step's wait."""
        counted, follows = is_there[1:], is_there[:-1]
        started, done, received = (columns[name][:, 1:] for name in ("started_ns", "done_ns", "received_ns"))
        free = np.where(follows, columns["done_ns"][:, :-1], 0)
        is_busy = follows & (columns["decode_rows"][0, 1:] > 0)
        waits = np.maximum(received - np.where(is_busy, free, np.maximum(free, received[0])), 0)[:, counted] * _NS
        times = np.maximum(done - np.maximum(started, free), 0)[:, counted] * _NS
        leads = (started.max(axis=0) - started)[:, counted] * _NS
        _add(self.of_job, step_tokens=(columns["decode_rows"] + columns["prefill_tokens"])[0, 1:][counted])
        for rank, spreads in enumerate(self.of_rank):
            _add(spreads, plan_wait=waits[rank], step_time=times[rank])
            self._recent[rank].extend(times[rank, -_RECENT:].tolist())
        if len(self.of_rank) > 1:
            _add(self.of_job, plan_bytes=columns["plan_bytes"][0, 1:][counted], step_skew=leads.max(axis=0))
            self._num_last += np.bincount(leads.argmin(axis=0), minlength=len(leads))
            for spreads, lead in zip(self.of_rank, leads, strict=True):
                _add(spreads, collective_wait=lead)


def _no_values(names: Sequence[str]) -> dict[str, Distribution]:
    return {name: Distribution(counts=[0] * (len(_BOUNDS[name]) + 1), total=0.0) for name in names}


def _add(spreads: dict[str, Distribution], **values: npt.NDArray[Any]) -> None:
    for name, found in values.items():
        spreads[name] = spreads[name].plus(_BOUNDS[name], found)
