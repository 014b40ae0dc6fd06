"""Collectives of ranks that share memory, in C: ``exchange.c``."""

import ctypes
from collections.abc import Callable

import torch

from tp_engine.cpu.layout import DTYPE_CODES, integers, pointers
from tp_engine.cpu.tape import address_of

MAX_RANKS = 64


class ExchangeLayout(ctypes.Structure):
    """``struct exchange`` of ``exchange.c``; the last four fields are its own."""

    _fields_ = (
        *pointers("slots results semaphores sem_post sem_trywait sem_timedwait sem_clockwait"),
        *integers("rank num_ranks slot_bytes two_shot_bytes spin_ns block_ns num_pieces offset stage peer"),
    )


class NativeExchange:
    """One rank's end.  ``late(rank)`` is called each time ``block_ns`` have been spent waiting for that rank, and may
    raise.  ``keeps`` owns the memory that ``layout`` points to.

    The first attempt holds the interpreter's lock: if the other ranks are there or come soon, it ends before another
    thread could be woken.  Later attempts let other threads run.
    """

    can_capture = True

    def __init__(
        self, library: ctypes.CDLL, layout: ExchangeLayout, late: Callable[[int], None], *, keeps: object
    ) -> None:
        holding = ctypes.PyDLL(library._name)
        names = "shared_all_reduce", "shared_all_gather"
        for name in names:
            function, waiting = getattr(holding, name), getattr(library, name).plain
            function.argtypes, function.restype = waiting.argtypes, waiting.restype
        self._quick_reduce, self._quick_gather = holding.shared_all_reduce, holding.shared_all_gather
        self._reduce, self._gather = (getattr(library, name).plain for name in names)
        self._layout, self._pointer, self._late = layout, ctypes.addressof(layout), late
        self._keeps = keeps
        self.slot_bytes: int = layout.slot_bytes

    def all_reduce(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` = the sum of ``tensor`` over ranks, both contiguous and of types of ``DTYPE_CODES``.

        ``out`` may be ``tensor``; else ``tensor`` is float32.
        """
        arguments = (
            self._pointer,
            address_of(tensor),
            address_of(out),
            tensor.numel(),
            DTYPE_CODES[tensor.dtype],
            DTYPE_CODES[out.dtype],
            torch.get_num_threads(),
        )
        if self._quick_reduce(*arguments, 0):
            while late := self._reduce(*arguments, 1):
                self._late(late - 1)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """``tensor`` (rows, width) of all ranks -> ``out`` (rows, ranks * width); contiguous, within ``slot_bytes``."""
        rows, width = tensor.shape
        arguments = (self._pointer, address_of(tensor), address_of(out), rows, width * tensor.itemsize)
        if self._quick_gather(*arguments, 0):
            while late := self._gather(*arguments, 1):
                self._late(late - 1)
