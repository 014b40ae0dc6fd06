"""From the mapped file to the parameter: directly on a CPU, by several threads at once to a GPU.

::

    CPU    file's pages -> parameter                                  one thread: torch copies with all of its own
    CUDA   file's pages -> page-locked room -> parameter              each thread has a room and a stream of its own:
                                                                      one waits for the disk while another copies

Reading a mapped file waits for its pages, so several threads wait at the same time.  numpy copies into the room, in one
thread and without Python's lock; torch would start all of its threads in each loading thread.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch

from tp_engine.distributed.device_threads import device_pool
from tp_engine.system.cpus import num_cpus

_ROOM_BYTES = 16 << 20
_MAX_THREADS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Copy = Callable[[torch.Tensor, torch.Tensor], None]
Item = TypeVar("Item")


class StagedCopy:
    """Copies tensors of the host to ``device`` through a room of ``room_bytes``; for CUDA it is page-locked."""

    def __init__(self, device: torch.device, room_bytes: int = _ROOM_BYTES) -> None:
        is_cuda = device.type == "cuda"
        self._room = torch.empty(room_bytes, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        if self._stream is not None:  # what was freed for the parameters' memory may still be in use there
            self._stream.wait_stream(torch.cuda.default_stream(device))

    def __call__(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy ``values`` to ``target``, of the same shape; returns when that is done."""
        row_bytes = max(values[:1].nbytes, 1)
        num_rows = len(self._room) // row_bytes
        assert num_rows > 0, f"a row of {row_bytes} bytes is larger than the room"
        for first in range(0, len(values), num_rows):
            self._copy(values[first : first + num_rows], target[first : first + num_rows])

    def _copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        room = self._room[: values.nbytes].view(values.dtype).view(values.shape)
        np.copyto(_as_integers(room), _as_integers(values))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            target.copy_(room, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def copy_directly(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``values`` to ``target`` in the calling thread."""
    target.copy_(values)


def num_threads_for(device: torch.device, local_world_size: int) -> int:
    """Return how many threads load to ``device``: for CUDA this rank's share of the cores, up to 8."""
    if device.type != "cuda":
        return 1
    return min(max(num_cpus() // local_world_size, 1), _MAX_THREADS)


def for_each(items: Iterable[Item], act: Callable[[Item, Copy], int], device: torch.device, num_threads: int) -> int:
    """Return the sum of ``act(item, copy)`` over ``items``, which the threads take in order; raises the first failure.

    With one thread the caller copies directly.
    """
    if num_threads == 1:
        return sum(act(item, copy_directly) for item in items)
    own = threading.local()

    def run(item: Item) -> int:
        if not hasattr(own, "copy"):
            own.copy = StagedCopy(device)
        with torch.no_grad():
            return act(item, own.copy)

    with device_pool(device, num_threads, name="weights") as pool:
        return sum(pool.map(run, items))


def _as_integers(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]:
    """The same memory as integers, because numpy has no bfloat16."""
    array: np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]] = tensor.view(_INTEGERS[tensor.itemsize]).numpy()
    return array
