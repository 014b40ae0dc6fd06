"""How the KV pool was used over time: a bounded history of samples, and their peaks and means."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tp_engine.errors import ConfigError
from tp_engine.sched.view import SchedulerStats

DEFAULT_HISTORY = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSample:
    """The pool at one moment; ``time_s`` is time.monotonic().  ``fragmentation`` is 1 - live tokens / (used blocks *
    block size): the share of the used blocks' slots that holds no token, 0 when no block is used.  Live tokens count in
    each group of layers that holds them."""

    time_s: float
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_live_tokens: int
    fragmentation: float

    @property
    def num_blocks(self) -> int:
        return self.num_free_blocks + self.num_cached_blocks + self.num_used_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests hold, 0 to 1."""
        return self.num_used_blocks / max(1, self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSummary:
    """Over the samples that are kept.  ``mean_fragmentation`` counts those in which a block was used."""

    num_samples: int
    span_s: float
    peak_usage: float
    mean_usage: float
    peak_fragmentation: float
    mean_fragmentation: float


class AllocationMonitor:
    """Keeps the last ``max_samples`` samples, at most one per ``interval_s``; older ones are forgotten.  A sample costs
    rank 0 what ``Scheduler.stats`` costs, some microseconds."""

    def __init__(self, *, max_samples: int = DEFAULT_HISTORY, interval_s: float = 0.0) -> None:
        if max_samples < 1:
            raise ConfigError(f"max_samples is {max_samples}; it must be at least 1")
        if not interval_s >= 0.0:
            raise ConfigError(f"interval_s is {interval_s}; it must be 0 or more")
        self.interval_s = interval_s
        self._samples: deque[AllocationSample] = deque(maxlen=max_samples)
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[AllocationSample]:
        """Samples, oldest first."""
        return iter(self._samples)

    def is_due(self, now_s: float) -> bool:
        """Return whether ``interval_s`` has passed since the last sample."""
        return now_s >= self._next_s

    def observe(self, stats: SchedulerStats, now_s: float) -> AllocationSample:
        """Keep a sample of the pool as ``stats`` has it."""
        sample = AllocationSample(
            time_s=now_s,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_used_blocks=stats.num_used_blocks,
            num_live_tokens=stats.num_live_tokens,
            fragmentation=stats.fragmentation,
        )
        self._samples.append(sample)
        self._next_s = now_s + self.interval_s
        return sample

    @property
    def latest(self) -> AllocationSample | None:
        """The newest sample; None before the first."""
        return self._samples[-1] if self._samples else None

    def summary(self) -> AllocationSummary:
        """Peaks and means of the samples; zeros before the first."""
        usage = [sample.usage for sample in self._samples]
        fragmentation = [sample.fragmentation for sample in self._samples if sample.num_used_blocks]
        return AllocationSummary(
            num_samples=len(usage),
            span_s=self._samples[-1].time_s - self._samples[0].time_s if usage else 0.0,
            peak_usage=max(usage, default=0.0),
            mean_usage=_mean(usage),
            peak_fragmentation=max(fragmentation, default=0.0),
            mean_fragmentation=_mean(fragmentation),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
