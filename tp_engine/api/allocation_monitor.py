"""The use of the KV pool over time: a bounded history of statistics, with peaks and means."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from tp_engine.sched.view import SchedulerStats

_HISTORY = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSummary:
    """Peaks and means of the samples kept; ``mean_fragmentation`` is over those in which a block was used."""

    num_samples: int
    span_s: float
    peak_usage: float
    mean_usage: float
    peak_fragmentation: float
    mean_fragmentation: float


class AllocationMonitor:
    """Keeps the last ``max_samples`` samples, at most one per ``interval_s``; older ones are forgotten.  A sample costs
    rank 0 what ``Scheduler.stats`` costs, some microseconds."""

    def __init__(self, *, max_samples: int = _HISTORY, interval_s: float = 0.0) -> None:
        self.interval_s = interval_s
        self._samples: deque[tuple[float, SchedulerStats]] = deque(maxlen=max_samples)
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[tuple[float, SchedulerStats]]:
        """Samples with their times (``time.monotonic()``), oldest first."""
        return iter(self._samples)

    def is_due(self, now_s: float) -> bool:
        """Whether ``interval_s`` has passed since the last sample."""
        return now_s >= self._next_s

    def observe(self, stats: SchedulerStats, now_s: float) -> None:
        """Keep a sample."""
        self._samples.append((now_s, stats))
        self._next_s = now_s + self.interval_s

    @property
    def latest(self) -> SchedulerStats | None:
        """The newest sample; None before the first."""
        return self._samples[-1][1] if self._samples else None

    def summary(self) -> AllocationSummary:
        """Peaks and means of the samples; zeros before the first."""
        usage = [stats.usage for _, stats in self._samples] or [0.0]
        fragmentation = [stats.fragmentation for _, stats in self._samples if stats.num_used_blocks] or [0.0]
        return AllocationSummary(
            num_samples=len(self._samples),
            span_s=self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0,
            peak_usage=max(usage),
            mean_usage=fmean(usage),
            peak_fragmentation=max(fragmentation),
            mean_fragmentation=fmean(fragmentation),
        )
