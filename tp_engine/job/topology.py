"""A rank's place, and which ranks share a host.  Every host has equally many, numbered host by host, as by torchrun.

::

    host               0                1
    ranks         0  1  2  3       4  5  6  7        world_size 8, local_world_size 4
    leader        0                4                 the first rank: has the ring, board, connections
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """``world_size`` ranks, ``local_world_size`` of them on each host."""

    world_size: int = 1
    local_world_size: int = 1

    def __post_init__(self) -> None:
        assert self.world_size % self.local_world_size == 0, f"{self.world_size} over hosts of {self.local_world_size}"

    @classmethod
    def one_host(cls, world_size: int) -> Topology:
        """Return all ranks on one host."""
        return cls(world_size=world_size, local_world_size=world_size)

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def far_hosts(self) -> range:
        """The hosts other than rank 0's."""
        return range(1, self.num_hosts)

    def host_of(self, rank: int) -> int:
        return rank // self.local_world_size

    def leader_of(self, host: int) -> int:
        """Return the first rank of ``host``."""
        return host * self.local_world_size

    def ranks_of(self, host: int) -> range:
        return range(self.leader_of(host), self.leader_of(host + 1))

    def is_leader(self, rank: int) -> bool:
        """Return whether ``rank`` is the first of its host."""
        return rank % self.local_world_size == 0

    def named(self, rank: int) -> str:
        """``'rank 5'``, and with several hosts ``'rank 5 (host 1)'``."""
        return f"rank {rank}" if self.num_hosts == 1 else f"rank {rank} (host {self.host_of(rank)})"


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

    @property
    def topology(self) -> Topology:
        """Which ranks share a host."""
        return Topology(world_size=self.world_size, local_world_size=self.local_world_size)
