"""A rank sleeps: the memory of its KV cache goes back to the system, for a trainer that takes turns with it.

::

    CPU     the cache's pages are dropped, and come back as zeros when they are used again
    CUDA    the storage behind all views of the cache is emptied, and filled again when the rank wakes up

Recordings hold addresses, so they are forgotten, and made anew at the end.  The weights stay.  Rank 0 has forgotten all
cached prefixes before, and no row runs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tp_engine.errors import RequestError

if TYPE_CHECKING:
    from tp_engine.worker.worker import Worker


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


class Sleep:
    """The order to sleep."""

    def __init__(self, worker: Worker, _arguments: Mapping[str, Any]) -> None:
        if worker.effective.config.kv_offloading_size:
            raise RequestError("an engine with a host tier can not sleep: the tier would keep blocks; leave it out")
        assert worker.runner is not None, "start() comes first"
        self._worker, self._runner = worker, worker.runner

    def commit(self) -> dict[str, Any]:
        """See ``Prepared``."""
        self._runner.forget_captured()
        for raw in self._runner.kv_memory:
            drop_memory(raw)
        self._worker.is_asleep = True
        self._worker.empty_cache()
        return {}

    def discard(self) -> None:
        """See ``Prepared``."""


class WakeUp:
    """The order to wake up."""

    def __init__(self, worker: Worker, _arguments: Mapping[str, Any]) -> None:
        assert worker.runner is not None, "start() comes first"
        self._worker, self._memory = worker, worker.runner.kv_memory
        try:
            for raw in self._memory:
                take_memory(raw)
        except BaseException:
            self.discard()
            raise

    def commit(self) -> dict[str, Any]:
        """See ``Prepared``."""
        self._worker.is_asleep = False
        self._worker.record()
        return {}

    def discard(self) -> None:
        """See ``Prepared``."""
        for raw in self._memory:
            drop_memory(raw)
