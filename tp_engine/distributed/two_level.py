"""Collectives over several hosts in two levels: shared memory inside a host, one exchange between the hosts.

::

    all-reduce    host 0:  r0 + r1 = s0  (shared memory)       first ranks swap s0, s1      s0 + s1 handed to all ranks
                  host 1:  r2 + r3 = s1                        (the library)                (shared memory)

A host's sum is a tree over its ranks in float32; the hosts' sums are added as a tree and rounded once.  So sums are
equal on all ranks and reproducible bit for bit.  If the numbers of hosts and of ranks per host are powers of two, they
equal those of a single host.

A tensor crosses the network once each way per host, whatever the number of ranks on the host.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from tp_engine.distributed.rank import Agreeing
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.linear.tree_sum import tree_sum


class Exchange(Protocol):
    """One rank's end; every rank calls the same methods in the same order.

    ``can_capture``: a recorded step may contain its calls, because all ranks have the compiled kernels.
    """

    slot_bytes: int
    can_capture: bool = False

    def all_reduce(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` = the sum of ``tensor`` over ranks, both contiguous, of types of ``DTYPES`` and of any size.

        ``out`` may be ``tensor``; else ``tensor`` is float32.
        """

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """``tensor`` (rows, width) of all ranks -> ``out`` (rows, ranks * width); contiguous, within ``slot_bytes``."""


class LocalRanks:
    """Agreements among the ranks of this host: ``host`` gathers from all ranks, and these keep their part."""

    def __init__(self, host: Agreeing) -> None:
        info = host.info
        self._host = host
        self._first = info.rank - info.local_rank
        self.info = RankInfo(
            rank=info.local_rank,
            world_size=info.local_world_size,
            local_rank=info.local_rank,
            local_world_size=info.local_world_size,
        )

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """The payloads of this host's ranks."""
        return self._host.all_gather_bytes(payload)[self._first : self._first + self.info.world_size]


class TwoLevelExchange(Exchange):
    """``local`` is the exchange of this host's ranks; ``swap`` gathers a tensor from the first rank of every host.

    ``swap`` is None on the other ranks.  ``slot_bytes`` is smaller than that of ``local``, whose slots must hold the
    parts of all ranks.
    """

    def __init__(
        self, local: Exchange, info: RankInfo, swap: Callable[[torch.Tensor], list[torch.Tensor]] | None
    ) -> None:
        self.slot_bytes = local.slot_bytes // info.world_size
        self.can_capture = local.can_capture
        self._local, self._swap, self._info = local, swap, info

    def all_reduce(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        total = tensor.view(-1).to(torch.float32, copy=True)
        self._local.all_reduce(total, total)
        total = total.zero_() if self._swap is None else tree_sum(self._swap(total))
        self._local.all_reduce(total, total)  # all but the first rank add zeros, so it broadcasts the sum
        out.view(-1).copy_(total)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        rows, width = tensor.shape
        here = tensor.new_empty((rows, self._info.local_world_size * width))
        self._local.all_gather(tensor, here)
        whole = torch.cat(self._swap(here), dim=-1) if self._swap is not None else torch.zeros_like(out)
        handed = out.new_empty((1, self._info.local_world_size * out.numel()))
        self._local.all_gather(whole.view(1, -1), handed)
        out.copy_(handed[0, : out.numel()].view_as(out))


def swap_between(group: dist.ProcessGroup, num_hosts: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """A function that gathers a tensor from the ranks of ``group``, the first of each host, in their order."""

    def swap(tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(num_hosts)]
        dist.all_gather(parts, tensor, group=group)
        return parts

    return swap


def ordered_sum(parts: Sequence[torch.Tensor], local_world_size: int) -> torch.Tensor:
    """The all-reduce of ``parts``, one per rank: a tree over each host's ranks, then over hosts, rounded once."""
    wide = [part.float() for part in parts]
    sums = [tree_sum(wide[first : first + local_world_size]) for first in range(0, len(wide), local_world_size)]
    return tree_sum(sums).to(parts[0].dtype)
