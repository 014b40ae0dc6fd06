"""The other ranks of a torch.distributed job that is not the engine's: each says a text, and all hear all texts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tp_engine.distributed.store import WatchedStore, store_of_job
from tp_engine.system import env

_MEET_S = 1800.0  # as torch.distributed waits for a rank


def place_in_job() -> tuple[int, int]:
    """This process's rank and the number of ranks, in the job that it has joined, or that its variables name."""
    launched = env.launched_rank()
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (0, 1) if launched is None else (launched.rank, launched.world_size)


def own_gpu() -> str:
    """The number of the GPU that this process computes on; empty without one."""
    return str(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def hear(place: int, num_ranks: int, name: str, said: str) -> list[str]:
    """What each of ``num_ranks`` ranks says, in their order, this one ``said``; ``name`` tells one occasion from
    another."""
    store = WatchedStore(dist.PrefixStore(f"tp_engine {name}", store_of_job()), lambda: None, timeout_s=_MEET_S)
    store.set(str(place), said)
    return [store.get(str(other)).decode() for other in range(num_ranks)]
