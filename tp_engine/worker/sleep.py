"""A rank sleeps: the memory of its KV cache goes back to the system, for a trainer that takes turns with it.

::

    CPU     the cache's pages are dropped, and come back as zeros when they are used again
    CUDA    the storage behind all views of the cache is emptied, and filled again when the rank wakes up

Recordings hold addresses, so they are forgotten, and made anew at the end.  The weights stay.  Rank 0 has forgotten all
cached prefixes before, and no row runs.
"""

import ctypes
import mmap
from collections.abc import Callable

import torch

from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import Prepared


def drop_memory(raw: torch.Tensor) -> None:
    """Give back what is behind ``raw``, a whole allocation on a GPU, or a mapping on a CPU (``map_zeros``)."""
    if raw.device.type == "cpu":
        num_bytes = raw.numel() * raw.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(raw.data_ptr()), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise failed")
    else:
        raw.untyped_storage().resize_(0)


def take_memory(raw: torch.Tensor) -> None:
    """Undo ``drop_memory``; the content is zeros, and a GPU's addresses are others.  Raises if there is no room."""
    if raw.device.type != "cpu":
        raw.untyped_storage().resize_(raw.numel() * raw.itemsize)
        raw.zero_()


def sleep(runner: ModelRunner, empty_cache: Callable[[], None]) -> Prepared:
    """Prepare the order to sleep; ``empty_cache`` gives memory that is free in this process back to the device."""
    runner.check_sleep()

    def commit() -> None:
        runner.graphs.forget()
        for raw in runner.kv_memory:
            drop_memory(raw)
        runner.is_asleep = True
        empty_cache()

    return Prepared(commit)


def wake_up(runner: ModelRunner) -> Prepared:
    """Prepare the order to wake up: take the memory."""
    memory = runner.kv_memory

    def discard() -> None:
        for raw in memory:
            drop_memory(raw)

    def commit() -> None:
        runner.is_asleep = False
        runner.record_again()

    try:
        for raw in memory:
            take_memory(raw)
    except BaseException:
        discard()
        raise
    return Prepared(commit, discard)
