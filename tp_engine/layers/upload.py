"""Host arrays to the device without waiting for it.

To CUDA they go through pinned memory.  Pinning memory takes long and may wait for the device, so a few parts are pinned
once and used in turn; a part is used again when the copies from it have ended, which seldom takes a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.system.units import round_up

Array: TypeAlias = npt.NDArray[Any]

_PART_BYTES, _NUM_PARTS = 4 << 20, 3
# Triton compiles another kernel for pointers that are not multiples of 16 bytes.
_ALIGNMENT = 16


def upload(array: Array, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``: on a CPU in its own memory; to CUDA through pinned memory, so that nothing waits."""
    return upload_all((array,), device)[0]


def upload_all(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Each of ``arrays`` as by ``upload``; to CUDA all in one copy, each at a multiple of 16 bytes."""
    if device.type == "cuda":
        return copy_together(arrays, device, _arena(device))
    return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]


def upload_into(target: torch.Tensor, array: Array) -> None:
    """Copy ``array`` into the contiguous ``target`` of the same shape and type, as by ``upload``."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if target.device.type == "cuda":
        room = _arena(target.device).take(array.nbytes).view(target.dtype).view(target.shape)
        source = room.copy_(source)
    target.copy_(source, non_blocking=True)


def copy_together(arrays: Sequence[Array], device: torch.device, arena: Arena) -> list[torch.Tensor]:
    """``arrays`` on ``device``, through one piece of ``arena``."""
    spans, total = [], 0
    for array in arrays:
        spans.append(slice(total, total + array.nbytes))
        total += round_up(array.nbytes, _ALIGNMENT)
    room = arena.take(total)
    on_host = room.numpy()
    for array, span in zip(arrays, spans, strict=True):
        on_host[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    arrived = torch.empty(total, dtype=torch.uint8, device=device).copy_(room, non_blocking=True)
    return [arrived[span].view(torch_type(array)).view(array.shape) for array, span in zip(arrays, spans, strict=True)]


def torch_type(array: Array) -> torch.dtype:
    """The tensor type of ``array``."""
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


class StreamEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has reached it."""


class Stream(Protocol):
    """Where copies are enqueued."""

    def record_event(self) -> StreamEvent:
        """The point after everything enqueued so far."""


class Arena:
    """Memory in ``parts`` of equal size, uint8, which are used in turn.

    What ``take`` returns is copied on ``current_stream()`` before the next ``take``, so that the events of a part,
    which are recorded when its last piece has been taken and copied, follow all copies from it.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        current_stream: Callable[[], Stream],
        make_part: Callable[[int], torch.Tensor],
    ) -> None:
        self._parts, self._current_stream, self._make_part = parts, current_stream, make_part
        self._ends: list[list[StreamEvent]] = [[] for _ in parts]
        self._part, self._used = 0, 0
        self._streams: set[Stream] = set()

    def take(self, num_bytes: int) -> torch.Tensor:
        """``num_bytes`` of a part; more than a part holds are allocated for this call, by ``make_part``."""
        if num_bytes > len(self._parts[0]):
            return self._make_part(num_bytes)
        if self._used + num_bytes > len(self._parts[0]):
            self._turn()
        self._streams.add(self._current_stream())
        start, self._used = self._used, self._used + round_up(num_bytes, _ALIGNMENT)
        return self._parts[self._part][start : start + num_bytes]

    def _turn(self) -> None:
        """Go on to the next part, once the copies from it have ended."""
        self._ends[self._part] = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        self._part, self._used = (self._part + 1) % len(self._parts), 0
        for event in self._ends[self._part]:
            event.synchronize()


@cache
def _arena(device: torch.device) -> Arena:
    """This process's arena for ``device``, made at its first upload, long before the first request."""
    make_part = partial(torch.empty, dtype=torch.uint8, device="cpu", pin_memory=True)
    with torch.inference_mode(False):  # inference tensors can be written in inference mode only
        parts = [make_part(_PART_BYTES) for _ in range(_NUM_PARTS)]
    return Arena(parts, partial(torch.cuda.current_stream, device), make_part)
