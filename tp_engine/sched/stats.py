"""What the scheduler tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.  Prefix queries and hits are tokens of requests at their first admission;
    recomputed tokens are those that a preempted sequence had, and did not find cached when it resumed."""

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot.  ``num_live_tokens`` have K/V in used blocks, and count in each group of layers that holds them;
    ``fragmentation`` is 1 - live tokens / (used blocks * block size), 0 when nothing is used."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_live_tokens: int
    fragmentation: float
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
