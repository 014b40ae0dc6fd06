"""Neighbouring ranks of a torch.distributed job that is not the engine's: what one of them says, all of them hear."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tp_engine.distributed.groups import make_group
from tp_engine.distributed.store import store_of_job
from tp_engine.system import env

_LONGEST_CALL = timedelta(days=7)


def place_in_job() -> tuple[int, int]:
    """Return this process's rank and the number of ranks in the job that it has joined, or that its variables name."""
    launched = env.launched_rank()
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (0, 1) if launched is None else (launched.rank, launched.world_size)


def own_gpu() -> str:
    """Return the number of the GPU that this process computes on; empty without one."""
    return str(torch.cuda.current_device()) if torch.cuda.is_available() else ""


class Neighbours:
    """``num_ranks`` neighbours of the job, of which this is the one at ``place``; ``number`` is that of the engine, in
    the order in which all ranks make engines."""

    def __init__(self, num_ranks: int, number: int) -> None:
        index, self.place = divmod(place_in_job()[0], num_ranks)
        self._num_ranks, name = num_ranks, f"tp_engine team {index} of engine {number}"
        store = dist.PrefixStore(name, store_of_job())
        self._group: dist.ProcessGroup | None = make_group("gloo", store, name, self.place, num_ranks, _LONGEST_CALL)

    def tell(self, said: Any) -> list[Any]:
        """Return what every rank says, in their order; all of them call this."""
        heard: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(heard, said, group=self._group)
        return heard

    def close(self) -> None:
        """Leave; the other ranks need not be there any more."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None  # the last reference: torch's threads end with the object
