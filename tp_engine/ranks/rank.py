"""This process's place among the ranks.  Plain data, passed to whoever needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """``local_rank`` counts on this host and picks the device; the engine spans ``world_size`` ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Rank 0 schedules and samples."""
        return self.rank == 0
