"""All-reduces and small all-gathers of ranks on one host, through memory that they share (``ipc/rank_slots.py``).

Sums are taken in the order of ranks, in float32, and rounded once: they are equal on all ranks, and repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

import torch

from tp_engine.errors import RankError
from tp_engine.ipc.rank_slots import RankSlots
from tp_engine.kernels.native.exchange import NativeExchange
from tp_engine.kernels.native.tape import call
from tp_engine.progress import RankProgress
from tp_engine.ranks.collectives import Communicator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Exchange(Protocol):
    """One rank's end; every rank calls the same, in the same order."""

    slot_bytes: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """``tensor``, contiguous, of one of ``DTYPES`` and any size, becomes its sum over ranks."""

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """``tensor`` (rows, width) of all ranks -> ``out`` (rows, ranks * width); contiguous, within ``slot_bytes``."""


class Patience:
    """What ends the waits of a collective: ``check``, which raises when the job has failed, and the time-out."""

    def __init__(self, check: Callable[[], None], *, timeout_s: float) -> None:
        self.started_ns = 0
        self._check = check
        self._timeout_s = timeout_s

    def late(self, rank: int) -> None:
        """Some time has been spent waiting for ``rank``; ``RankError`` if that was too much, or in vain."""
        self._check()
        if monotonic_ns() - self.started_ns > self._timeout_s * 1e9:
            raise RankError(rank, f"did not come to a collective within {self._timeout_s:g} s")


class TorchExchange:
    """The twin of the compiled one: the same sums, bit for bit, with semaphores and tensors of Python.

    ``late(rank)`` is called each time ``block_s`` have been spent waiting for that rank, and may raise.
    """

    def __init__(self, slots: RankSlots, rank: int, late: Callable[[int], None], *, block_s: float) -> None:
        others = [other for other in range(slots.num_ranks) if other != rank]
        self.slot_bytes = slots.slot_bytes
        self._bytes = torch.frombuffer(slots.memory, dtype=torch.uint8)
        self._slots, self._rank, self._late = slots, rank, late
        self._mine = [slots.semaphore(rank, other) for other in others]
        self._theirs = [(other, slots.semaphore(other, rank)) for other in others]
        self._block_s = block_s
        self._num_pieces = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See ``Exchange``."""
        for piece in torch.split(tensor.view(-1), self.slot_bytes // tensor.itemsize):
            first, *others = self._swap(piece)
            total = first.to(torch.float32, copy=True)
            for other in others:
                total.add_(other)
            piece.copy_(total)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Exchange``."""
        torch.cat(self._swap(tensor), dim=-1, out=out)

    def _swap(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' parts, in their order, until the next call."""
        piece, self._num_pieces = self._num_pieces, self._num_pieces + 1
        starts = [self._slots.slot_offset(rank, piece) for rank in range(self._slots.num_ranks)]
        parts = [self._bytes[start : start + mine.nbytes].view(mine.dtype).view_as(mine) for start in starts]
        parts[self._rank].copy_(mine)
        for semaphore in self._mine:
            semaphore.post()
        for rank, semaphore in self._theirs:
            while not semaphore.wait(self._block_s):
                self._late(rank)
        return parts


class SharedMemoryCommunicator:
    """``library``'s collectives, but all-reduces of ``DTYPES``, and all-gathers that fit, through ``exchange``.

    A tape holds an all-reduce as a call of Python, for the sake of its phase, its deadline and its time.
    """

    def __init__(self, library: Communicator, exchange: Exchange, patience: Patience, progress: RankProgress) -> None:
        self.info = library.info
        self.can_capture = isinstance(exchange, NativeExchange)  # then all ranks have the compiled kernels
        self._library = library
        self._exchange = exchange
        self._patience = patience
        self._progress = progress

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in DTYPES or not tensor.is_contiguous():
            return self._library.all_reduce(tensor)
        call(self._all_reduce, tensor)
        return tensor

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        self._progress.collective()
        self._patience.started_ns = started_ns = monotonic_ns()
        try:
            self._exchange.all_reduce(tensor)
        except BaseException as failure:
            self._exchange = _Broken(failure)
            raise
        self._progress.collected(started_ns)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if not 0 < tensor.nbytes <= self._exchange.slot_bytes or tensor.dim() == 0:
            return self._library.all_gather(tensor)
        self._progress.collective()
        self._patience.started_ns = started_ns = monotonic_ns()
        *rows, width = tensor.shape
        out = tensor.new_empty((*rows, self.info.world_size * width))
        try:
            self._exchange.all_gather(tensor.contiguous().view(-1, width), out.view(-1, out.shape[-1]))
        except BaseException as failure:
            self._exchange = _Broken(failure)
            raise
        self._progress.collected(started_ns)
        return out

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._library.gather(tensor)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._library.broadcast(tensor)


class _Broken:
    """After a collective that did not end, the ranks are no longer in step."""

    slot_bytes = 1 << 62

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._raise()

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        self._raise()

    def _raise(self) -> None:
        if isinstance(self._failure, RankError):
            raise self._failure
        raise RuntimeError("an earlier collective did not end, so the ranks are no longer in step") from self._failure


def rank_ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """What an all-reduce of ``parts``, one per rank, gives: added in their order in float32, then rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)
