"""One rank of a job that shares memory, without an engine; the test starts this process and may kill it.

python -m tests.ranks.exchange_job RANK NUM_RANKS STORE_PORT CASE
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from tp_engine.distributed import groups
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.shared_memory import DTYPES, SharedMemoryCommunicator, with_shared_memory
from tp_engine.distributed.store import join_store
from tp_engine.distributed.two_level import ordered_sum
from tp_engine.errors import RankError
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo

SLOT_BYTES = 96 * 1024
# Odd sizes, one item more than a slot, several pieces, one and two shots.
SIZES = (1, 15, 16, 17, 1024, 24576, 24577, 49153, 100003)
COLLECTIVE_S = {"exact": 60.0, "killed": 60.0, "asleep": 5.0}


def main(rank: int, num_ranks: int, port: int, case: str) -> None:
    """Join, run ``case`` through shared memory, and print a line of results."""
    torch.set_num_threads(1)
    info = RankInfo(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
    store = join_store("127.0.0.1", port, timeout_s=60)
    death_s = float("inf")

    def check() -> None:
        if time.monotonic() > death_s:
            raise RankError(1, "its process is gone")

    joined = groups.join(info, store, RankProgress(), check, device_type="cpu", start_s=60, collective_s=60)
    shared = share(joined, check, timeout_s=COLLECTIVE_S[case])
    if case == "exact":
        digest = exact(shared, joined.communicator)
        come_late(shared)
        joined.close()
        print(digest)
    else:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
        death_s = time.monotonic() + 0.2 if case == "killed" else death_s
        print(forsaken(shared))
    sys.stdout.flush()
    os._exit(0)


def share(joined: RankGroups, check: Callable[[], None], *, timeout_s: float) -> SharedMemoryCommunicator:
    """A communicator with its own memory."""
    made = with_shared_memory(
        joined.communicator, joined.host, joined.progress, check, timeout_s=timeout_s, is_required=True,
        slot_bytes=SLOT_BYTES,
    )  # fmt: skip
    assert isinstance(made, SharedMemoryCommunicator)
    return made


def exact(shared: SharedMemoryCommunicator, library: Communicator) -> str:
    """Compare every size and type with the tree over gloo's gathered parts; returns a digest of results."""
    digest = hashlib.sha256()
    generator = torch.Generator().manual_seed(shared.info.rank)
    for dtype in DTYPES:
        for size in SIZES:
            mine = torch.randn(size, generator=generator).to(dtype)
            expected = ordered_sum(torch.split(library.all_gather(mine), size), library.info.local_world_size)
            for _ in range(3):
                found = mine.clone()
                assert shared.all_reduce(found) is found
                assert torch.equal(found, expected), (dtype, size)
            digest.update(found.view(torch.uint8).numpy().tobytes())
            part = torch.randn(1, size, generator=generator)
            total = shared.tree_reduce(part, dtype)
            assert total.dtype is dtype and torch.equal(total, library.tree_reduce(part, dtype)), (dtype, size)
    for tensor in (torch.arange(7) + shared.info.rank, torch.randn(3, 5, generator=generator), torch.ones(2, 3, 4)):
        gathered = shared.all_gather(tensor)
        assert torch.equal(gathered, library.all_gather(tensor))
    transposed = torch.arange(6.0).view(2, 3).t()  # not contiguous: the library gathers it, and sums integers
    assert torch.equal(shared.all_gather(transposed), torch.cat([transposed] * shared.info.world_size, -1))
    numbers = torch.arange(4)
    assert shared.all_reduce(numbers).tolist() == [number * shared.info.world_size for number in range(4)]
    assert torch.equal(shared.all_gather(torch.ones(SLOT_BYTES)), torch.ones(SLOT_BYTES * shared.info.world_size))
    return digest.hexdigest()


def come_late(shared: SharedMemoryCommunicator) -> None:
    """Each rank in turn comes late, by more than one slice of a wait; the summed values change each time."""
    world_size, totals = shared.info.world_size, []
    for turn in range(2 * world_size):
        if turn % world_size == shared.info.rank:
            time.sleep(0.08)
        totals.append(shared.all_reduce(torch.full((1000,), float(turn))).sum().item())
    assert totals == [1000.0 * world_size * turn for turn in range(2 * world_size)]


def forsaken(shared: SharedMemoryCommunicator) -> str:
    """The error of the wait for rank 1, and of every later collective; those must not wait again."""
    found = set()
    for collective in (shared.all_reduce, shared.all_reduce, shared.all_gather):
        try:
            collective(torch.ones(10))
        except RankError as error:
            found.add(str(error))
    return " and ".join(found)


if __name__ == "__main__":
    rank, world_size, port = map(int, sys.argv[1:4])
    main(rank, world_size, port, sys.argv[4])
