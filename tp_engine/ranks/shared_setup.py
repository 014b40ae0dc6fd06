"""Whether the ranks of one host share memory: set up step by step, and agreed on, so that all do or none does."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from tp_engine.ipc.rank_slots import RankSlots
from tp_engine.kernels.native import exchange as native
from tp_engine.kernels.native.library import native_library
from tp_engine.log import get_logger
from tp_engine.progress import RankProgress
from tp_engine.ranks.agreement import Agreeing, all_do
from tp_engine.ranks.collectives import Communicator
from tp_engine.ranks.reduce_plan import SHARED_SLOT_BYTES, shared_two_shot_bytes
from tp_engine.ranks.shared_exchange import (
    DTYPES,
    Exchange,
    Patience,
    SharedMemoryCommunicator,
    TorchExchange,
    rank_ordered_sum,
)

logger = get_logger(__name__)

_SPIN_S = 100e-6
_BLOCK_S = 0.05


def with_shared_memory(
    library: Communicator,
    host: Agreeing,
    progress: RankProgress,
    check: Callable[[], None],
    *,
    timeout_s: float,
    is_required: bool,
    slot_bytes: int = SHARED_SLOT_BYTES,
) -> Communicator:
    """``library`` with all-reduces through shared memory, or, where a rank can not, as it is.

    A collective of ranks on one host.  ``check`` is called during waits, and raises when the job has failed; a
    collective takes ``timeout_s`` at most.  Raises ``RankError`` instead where ``is_required``.
    """
    together = partial(all_do, host, "shared memory", "shm", is_required=is_required)
    slots = _shared_slots(host, slot_bytes, together)
    if slots is None:
        return library
    patience = Patience(check, timeout_s=timeout_s)
    exchange = _make_exchange(slots, host, patience)
    made = SharedMemoryCommunicator(library, exchange, patience, progress)
    if together(lambda: check_exchange(made, library, slot_bytes)) is None:
        return library
    if host.info.is_first:
        logger.info("all-reduces go through shared memory (%s)", type(exchange).__name__)
    return made


def _shared_slots(
    host: Agreeing, slot_bytes: int, together: Callable[[Callable[[], RankSlots | str]], RankSlots | str | None]
) -> RankSlots | None:
    """The slots, mapped by every rank; rank 0 makes them."""
    info = host.info
    own = together(lambda: RankSlots.create(info.world_size, slot_bytes) if info.is_first else "another rank's")
    if own is None:
        return None
    try:
        address = host.all_gather_bytes(own.address.encode() if isinstance(own, RankSlots) else b"")[0].decode()
        found = together(lambda: own if isinstance(own, RankSlots) else RankSlots.attach(address))
    finally:
        if isinstance(own, RankSlots):
            own.stop_sharing()
    return found if isinstance(found, RankSlots) else None


def _make_exchange(slots: RankSlots, host: Agreeing, patience: Patience) -> Exchange:
    """The compiled one where every rank has it."""
    rank, spin_s = host.info.rank, _spin_s(host)
    compiled = native_library()
    words = host.all_gather_bytes(b"" if compiled is None else b"1")
    if compiled is None or not all(words) or slots.num_ranks > native.MAX_RANKS:
        return TorchExchange(slots, rank, patience.late, block_s=_BLOCK_S)
    layout = native.ExchangeLayout(
        slots=slots.base + slots.slots_offset,
        results=slots.base + slots.results_offset,
        semaphores=slots.base + slots.semaphores_offset,
        rank=rank,
        num_ranks=slots.num_ranks,
        slot_bytes=slots.slot_bytes,
        two_shot_bytes=shared_two_shot_bytes(slots.num_ranks),
        spin_ns=int(spin_s * 1e9),
        block_ns=int(_BLOCK_S * 1e9),
    )
    return native.NativeExchange(compiled, layout, patience.late, keeps=slots)


def _spin_s(host: Agreeing) -> float:
    """How long a wait may spin before it blocks: 0 if the ranks have fewer cores than there are ranks."""
    mine = ",".join(map(str, os.sched_getaffinity(0)))
    cores = {core for theirs in host.all_gather_bytes(mine.encode()) for core in theirs.decode().split(",")}
    return _SPIN_S if len(cores) >= host.info.world_size else 0.0


def check_exchange(made: Communicator, library: Communicator, slot_bytes: int) -> int:
    """All-reduce and gather random tensors of each kind; a collective.  The number of results, all as they should be.

    A rank that finds a difference goes on, as the others do, and raises ``RuntimeError`` at the end.
    """
    generator = torch.Generator().manual_seed(made.info.rank)
    wrong, num_results = [], 0
    for dtype in DTYPES:
        for count in (1, 100, slot_bytes // dtype.itemsize + 33):
            mine = torch.randn(count, generator=generator).to(dtype)
            whole = library.all_gather(mine)
            expected = rank_ordered_sum(list(torch.split(whole, count)))
            sums = [made.all_reduce(mine.clone()) for _ in range(2)]
            if not all(torch.equal(one, expected) for one in sums):
                wrong.append(f"{count} numbers of {dtype} gave another sum")
            if not torch.equal(made.all_gather(mine), whole):
                wrong.append(f"{count} numbers of {dtype} were gathered wrongly")
            num_results += 3
    if wrong:
        raise RuntimeError(wrong[0])
    return num_results
