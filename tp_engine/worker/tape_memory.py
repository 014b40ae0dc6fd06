"""Memory of recorded steps on CPUs, and the watch that sees to it that nothing else happens in them.

While a step is recorded, what it allocates comes from a pool.  What it gives up on its way is used again, later in the
step and by other recordings; what a recording returns stays its own as long as it is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tp_engine.kernels.native.tape import is_recording
from tp_engine.units import round_up

_ALIGNMENT = 64
_SLAB_BYTES = 1 << 18
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class TapeMemory:
    """A pool of slabs; each of its tensors gives its room back when nobody holds it any more."""

    def __init__(self) -> None:
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []  # (slab, first byte, end), without neighbours

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose values mean nothing."""
        num_bytes = shape.numel() * dtype.itemsize
        room = round_up(max(num_bytes, 1), _ALIGNMENT)
        index = next((i for i, (_, first, end) in enumerate(self._free) if end - first >= room), None)
        if index is None:
            index = self._add_slab(room)
        slab, first, end = self._free.pop(index)
        if end - first > room:
            self._free.append((slab, first + room, end))
        taken = self._slabs[slab][first : first + num_bytes]
        weakref.finalize(taken, self._give_back, slab, first, first + room).atexit = False
        return torch.from_numpy(taken).view(dtype).view(shape)

    def _add_slab(self, room: int) -> int:
        num_bytes = max(room, _SLAB_BYTES)
        whole = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT
        self._slabs.append(whole[start : start + num_bytes])
        self._free.append((len(self._slabs) - 1, 0, num_bytes))
        return len(self._free) - 1

    def _give_back(self, slab: int, first: int, end: int) -> None:
        for neighbour in [piece for piece in self._free if piece[0] == slab and (piece[2] == first or piece[1] == end)]:
            self._free.remove(neighbour)
            first, end = min(first, neighbour[1]), max(end, neighbour[2])
        self._free.append((slab, first, end))


class TapeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Serves allocations from ``memory`` and lets views pass; ``objection`` names the first other operation of PyTorch.

    Such an operation is carried out, but a tape of the step would lack it.
    """

    def __init__(self, memory: TapeMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.objection: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what torch puts around a mode otherwise imports its compiler, a second or two in the first decode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_recording():
            return func(*args, **kwargs)
        if func._schema.name in _ALLOCATIONS:
            return self._allocate(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.objection is None and (func._schema.is_mutable or not _is_view(result, args)):
            self.objection = f"{func} is no compiled kernel"
        return result

    def _allocate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        wanted: torch.Tensor = func(*args, **kwargs)
        if wanted.device.type == "cpu" and wanted.is_contiguous():
            return self._memory.allocate(wanted.shape, wanted.dtype)
        self.objection = self.objection or f"{func} allocates a tensor of another kind"
        return wanted


def _is_view(result: Any, arguments: Iterable[Any]) -> bool:
    """Whether ``result`` is nothing but views of tensors among ``arguments``."""
    known = {_storage(one) for one in arguments} - {None}
    return all(_storage(one) in known for one in (result if isinstance(result, (list, tuple)) else [result]))


def _storage(one: Any) -> int | None:
    """The address of a tensor's memory; None for what is none, and for one in an order of oneDNN's own."""
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return None
    return one.untyped_storage().data_ptr()
