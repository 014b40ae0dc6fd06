"""Memory, descriptors and threads of every rank over time, and whether they grow."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field

import psutil

MIB = 1 << 20
_FEWEST_SAMPLES = 6


def rank_processes() -> list[psutil.Process]:
    """The ranks that this process started, in the order of their start: ranks 1 to N - 1."""
    children = [child for child in psutil.Process().children() if "rank_main" in " ".join(child.cmdline())]
    return sorted(children, key=lambda child: (child.create_time(), child.pid))


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    rss: int
    descriptors: int
    threads: int


def sample(process: psutil.Process) -> Sample:
    """What the process holds now."""
    with process.oneshot():
        return Sample(process.memory_info().rss, process.num_fds(), process.num_threads())


@dataclass
class Usage:
    """Samples of each rank of one engine, all taken while it was idle, so that they can be compared."""

    by_rank: list[list[Sample]] = field(default_factory=list)

    def take(self) -> None:
        """One more sample of this process (rank 0) and its ranks."""
        processes = [psutil.Process(os.getpid()), *rank_processes()]
        if not self.by_rank:
            self.by_rank = [[] for _ in processes]
        assert len(processes) == len(self.by_rank), f"{len(processes)} ranks live, {len(self.by_rank)} were started"
        for samples, process in zip(self.by_rank, processes, strict=True):
            samples.append(sample(process))

    def settled(self) -> list[list[Sample]]:
        """The samples after the warm-up, which is the first third; none where there are too few to tell."""
        num_samples = len(self.by_rank[0]) if self.by_rank else 0
        first = max(1, num_samples // 3)
        return [samples[first:] for samples in self.by_rank] if num_samples - first >= _FEWEST_SAMPLES else []

    def rss_growth(self) -> list[int]:
        """Per rank: bytes by which the last samples' median is above the first ones', after the warm-up."""
        return [_growth([one.rss for one in samples]) for samples in self.settled()]

    def check(self, most_rss_growth: int) -> None:
        """Descriptors and threads must not grow at all, memory by ``most_rss_growth`` bytes."""
        for rank, samples in enumerate(self.settled()):
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
