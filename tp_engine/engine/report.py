"""What rank 0 tells of the whole job when it is asked: the scheduler, every rank's steps and memory.  Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from tp_engine.sched.view import SchedulerStats, SchedulerView

#: Upper bounds of the distributions' buckets; a last bucket without a bound follows.
STEP_TIME_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_S = (1e-05, 2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
PLAN_BYTES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1048576)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How many values fell into each bucket since the start, the last one without an upper bound, and their sum."""

    counts: list[int]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank, from its slot of the job's board.

    ``plan_wait``: seconds between the end of a step and the arrival of the next plan while there was work to do.
    ``step_time``: seconds that steps took on this rank; on ranks of a GPU other than 0, until all was launched.
    ``collective_wait``: seconds between this rank's begin of a step and the last rank's, which it must at least wait
    in the step's first collective.  ``collective_s``: seconds in collectives, waiting included, where the host does
    them (CPU).  ``num_last`` steps were begun by this rank last.  ``recent_step_s`` are its last steps' times, oldest
    first.  ``memory`` has bytes by line of the ledger (``MEMORY_LINES`` of the board), ``resident_bytes`` the process's
    host memory now, ``startup_s`` has seconds by phase of its start.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The job at one moment.

    ``step_tokens`` are tokens per step, ``plan_bytes`` bytes per plan sent, ``step_skew`` seconds between the first and
    the last rank's begin of a step (the latter two are empty for one rank).  Steps that came and went between two
    reports, beyond the last 512, are in no distribution: ``num_missed_steps`` counts them.
    """

    stats: SchedulerStats
    ranks: list[RankReport]
    step_tokens: Distribution
    plan_bytes: Distribution
    step_skew: Distribution
    num_missed_steps: int
    view: SchedulerView | None = None
