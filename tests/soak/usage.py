"""Memory, descriptors and threads of every rank over time, and whether they grow."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

MIB = 1 << 20
_FEWEST_SAMPLES = 6
_WARM_UP_STEPS = 1500  # libraries keep a kernel for every shape, and steps have many shapes


def rank_processes() -> list[psutil.Process]:
    """The ranks that this process started, in the order of their start: ranks 1 to N - 1."""
    children = [child for child in psutil.Process().children() if "rank_process" in " ".join(child.cmdline())]
    return sorted(children, key=lambda child: (child.create_time(), child.pid))


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    rss: int
    descriptors: int
    threads: int


def sample(process: psutil.Process) -> Sample:
    """The process's memory, descriptors and threads now."""
    with process.oneshot():
        return Sample(process.memory_info().rss, process.num_fds(), process.num_threads())


@dataclass
class Usage:
    """Samples of each rank of one engine, all taken while it was idle, so that they can be compared."""

    by_rank: list[list[Sample]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def take(self, num_steps: int, others: Sequence[psutil.Process]) -> None:
        """Add a sample of this process (rank 0) and of the ``others``, after ``num_steps`` steps."""
        processes = [psutil.Process(os.getpid()), *others]
        if not self.by_rank:
            self.by_rank = [[] for _ in processes]
        for samples, process in zip(self.by_rank, processes, strict=True):
            samples.append(sample(process))
        self.steps.append(num_steps)

    def rss_growth(self) -> list[int]:
        """Each rank's growth in bytes: the median of the last samples minus that of the first ones after the warm-up.

        Empty if too few steps were taken.
        """
        first = sum(steps < _WARM_UP_STEPS for steps in self.steps)
        if len(self.steps) - first < _FEWEST_SAMPLES:
            return []
        return [_growth([one.rss for one in samples[first:]]) for samples in self.by_rank]

    def check(self, most_rss_growth: int) -> None:
        """Descriptors and threads must not grow at all, memory by ``most_rss_growth`` bytes."""
        for rank, samples in enumerate(self.by_rank if len(self.steps) >= _FEWEST_SAMPLES else []):
            for name in ("descriptors", "threads"):
                counts = [getattr(one, name) for one in samples]
                third = len(counts) // 3
                assert min(counts[-third:]) <= max(counts[:third]), f"rank {rank}: {name} grow: {counts}"
        for rank, growth in enumerate(self.rss_growth()):
            assert growth <= most_rss_growth, (
                f"rank {rank}: memory grows: {growth / MIB:.1f} MiB in {len(self.by_rank[rank])} samples, "
                f"{most_rss_growth / MIB:.1f} MiB are allowed"
            )


def _growth(values: list[int]) -> int:
    third = len(values) // 3
    return int(statistics.median(values[-third:]) - statistics.median(values[:third]))
