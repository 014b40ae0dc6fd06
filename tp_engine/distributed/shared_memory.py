"""All-reduces and small all-gathers of ranks on one host, through memory that they share (``ipc/tensor_slots.py``).

Sums are trees over the ranks (``kernels/linear/tree_sum.py``) in float32, rounded once: equal on all ranks, and
reproducible bit for bit.  With several hosts, the ranks of each share memory, and ``two_level.py`` joins the hosts.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TypeAlias

import torch

from tp_engine.cpu import MAX_RANKS, ExchangeLayout, NativeExchange, call, native_library
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.rank import Agreeing, all_do
from tp_engine.distributed.reduce_plan import SHARED_SLOT_BYTES, shared_two_shot_bytes
from tp_engine.distributed.two_level import Exchange, LocalRanks, TwoLevelExchange, ordered_sum
from tp_engine.errors import RankError, again
from tp_engine.ipc import semaphore
from tp_engine.ipc.tensor_slots import SEMAPHORES_OFFSET, TensorSlots
from tp_engine.job.progress import RankProgress
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Swap: TypeAlias = Callable[[torch.Tensor], list[torch.Tensor]]

_SPIN_S = 100e-6
_BLOCK_S = 0.05

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def with_shared_memory(
    library: Communicator,
    host: Agreeing,
    progress: RankProgress,
    check: Callable[[], None],
    *,
    timeout_s: float,
    is_required: bool,
    slot_bytes: int = SHARED_SLOT_BYTES,
    swap: Swap | None = None,
) -> Communicator:
    """``library`` with all-reduces through shared memory, or ``library`` itself if a rank cannot use it.

    A collective.  ``swap`` is for the first rank of each of several hosts, see ``TwoLevelExchange``.  ``check`` is
    called while waiting, and raises if the job has failed; a collective takes ``timeout_s`` at most.  If
    ``is_required``, all ranks raise ``RankError`` if one cannot use it.
    """
    together = partial(all_do, host, "shared memory", "shm", is_required=is_required)
    info = host.info
    is_one_host = info.topology.num_hosts == 1
    local = host if is_one_host else LocalRanks(host)
    compiled = together(partial(_compiled_kernels, local.info.world_size))
    slots = None if compiled is None else _shared_slots(local, slot_bytes, together)
    if compiled is None or slots is None:
        return library
    patience = Patience(check, timeout_s=timeout_s)
    layout = _layout(slots, local)
    exchange: Exchange = NativeExchange(
        compiled, layout, lambda rank: patience.late(info.rank - info.local_rank + rank), keeps=slots
    )
    exchange = exchange if is_one_host else TwoLevelExchange(exchange, info, swap)
    made = SharedMemoryCommunicator(library, exchange, patience, progress)
    if together(lambda: check_exchange(made, library, slot_bytes)) is None:
        return library
    if host.info.is_first:
        logger.info("all-reduces go through shared memory (%s)", type(exchange).__name__)
    return made


def _shared_slots(
    host: Agreeing, slot_bytes: int, together: Callable[[Callable[[], TensorSlots | str]], TensorSlots | str | None]
) -> TensorSlots | None:
    """The slots, which the host's first rank creates and all its ranks map."""
    info = host.info
    own = together(lambda: TensorSlots.create(info.world_size, slot_bytes) if info.is_first else "another rank's")
    if own is None:
        return None
    try:
        address = host.all_gather_bytes(own.address.encode() if isinstance(own, TensorSlots) else b"")[0].decode()
        found = together(lambda: own if isinstance(own, TensorSlots) else TensorSlots.attach(address))
    finally:
        if isinstance(own, TensorSlots):
            own.stop_sharing()
    return found if isinstance(found, TensorSlots) else None


def _compiled_kernels(num_ranks: int) -> ctypes.CDLL:
    if num_ranks > MAX_RANKS:
        raise RuntimeError(f"{num_ranks} ranks are on one host, and it takes at most {MAX_RANKS}")
    if (compiled := native_library()) is None:
        raise RuntimeError("there are no compiled kernels here (the log says why)")
    return compiled


def _layout(slots: TensorSlots, host: Agreeing) -> ExchangeLayout:
    return ExchangeLayout(
        slots=slots.base + slots.slots_offset, results=slots.base + slots.results_offset,
        semaphores=slots.base + SEMAPHORES_OFFSET, rank=host.info.rank, num_ranks=slots.num_ranks,
        slot_bytes=slots.slot_bytes, two_shot_bytes=shared_two_shot_bytes(slots.num_ranks),
        spin_ns=int(_spin_s(host) * 1e9), block_ns=int(_BLOCK_S * 1e9), **semaphore.functions(),
    )  # fmt: skip


def _spin_s(host: Agreeing) -> float:
    """How long a wait spins before it blocks; 0 if there are fewer cores than ranks."""
    mine = ",".join(map(str, os.sched_getaffinity(0)))
    cores = {core for theirs in host.all_gather_bytes(mine.encode()) for core in theirs.decode().split(",")}
    return _SPIN_S if len(cores) >= host.info.world_size else 0.0


def check_exchange(made: Communicator, library: Communicator, slot_bytes: int) -> int:
    """All-reduce and gather random tensors of each dtype; a collective.  Returns the number of correct results.

    A rank that finds a difference continues with the others, and raises ``RuntimeError`` at the end.
    """
    generator = torch.Generator().manual_seed(made.info.rank)
    wrong, num_results = [], 0
    for dtype in DTYPES:
        for count in (1, 100, slot_bytes // dtype.itemsize + 33):
            mine = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
            whole = library.all_gather(mine)
            expected = ordered_sum(torch.split(whole, count), made.info.local_world_size)
            sums = [made.all_reduce(mine.clone()) for _ in range(2)]
            if not all(torch.equal(one, expected) for one in sums):
                wrong.append(f"{count} numbers of {dtype} gave another sum")
            if not torch.equal(made.all_gather(mine), whole):
                wrong.append(f"{count} numbers of {dtype} were gathered wrongly")
            num_results += 3
    if wrong:
        raise RuntimeError(wrong[0])
    return num_results


class Patience:
    """Bounds the waits of a collective: ``check`` raises if the job has failed, and there is a timeout."""

    def __init__(self, check: Callable[[], None], *, timeout_s: float) -> None:
        self.started_ns = 0
        self._check = check
        self._timeout_s = timeout_s

    def late(self, rank: int) -> None:
        """Raise ``RankError`` if the job has failed or the time is up; called while waiting for ``rank``."""
        self._check()
        if monotonic_ns() - self.started_ns > self._timeout_s * 1e9:
            raise RankError(rank, f"did not come to a collective within {self._timeout_s:g} s")


class SharedMemoryCommunicator(Communicator):
    """``library``'s collectives, but all-reduces of ``DTYPES``, and all-gathers that fit, go through ``exchange``.

    A tape contains an all-reduce as a call of Python, which keeps its progress, its deadline and its time.
    """

    def __init__(self, library: Communicator, exchange: Exchange, patience: Patience, progress: RankProgress) -> None:
        self.info = library.info
        self.can_capture = exchange.can_capture
        self._library = library
        self._exchange = exchange
        self._patience = patience
        self._progress = progress

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in DTYPES or not tensor.is_contiguous():
            return self._library.all_reduce(tensor)
        call(self._all_reduce, tensor, tensor)
        return tensor

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(part.shape, dtype=dtype, device="cpu")
        call(self._all_reduce, part, out)
        return out

    def _all_reduce(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        self._run(self._exchange.all_reduce, tensor, out)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if not 0 < tensor.nbytes <= self._exchange.slot_bytes or tensor.dim() == 0:
            return self._library.all_gather(tensor)
        *rows, width = tensor.shape
        out = tensor.new_empty((*rows, self.info.world_size * width))
        self._run(self._exchange.all_gather, tensor.contiguous().view(-1, width), out.view(-1, out.shape[-1]))
        return out

    def _run(
        self, collective: Callable[[torch.Tensor, torch.Tensor], None], tensor: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._progress.collective()
        self._patience.started_ns = started_ns = monotonic_ns()
        try:
            collective(tensor, out)
        except BaseException as failure:
            self._exchange = _Broken(failure)
            raise
        self._progress.collected(started_ns)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._library.gather(tensor)


class _Broken(Exchange):
    """Refuses all collectives after one that did not end, because the ranks are no longer in step."""

    slot_bytes = 1 << 62

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    def all_reduce(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if isinstance(self._failure, RankError):
            raise again(self._failure)
        raise RuntimeError("an earlier collective did not end, so the ranks are no longer in step") from self._failure

    all_gather = all_reduce
