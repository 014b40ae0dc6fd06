"""Memory that shows what a candidate does to it: what it leaves unwritten, and what it writes outside.

::

    guard | the tensor, all bits set: NaN | guard         each allocation, while ``Guards`` are active

What is allocated by name (``torch.empty`` and its like) is guarded, as the outputs and workspaces of our kernels are.
What PyTorch's products and attention allocate for their output comes, on a GPU, to lie between two guards, too: they
are called twice, the second time when a piece of just that size between two others has become free.  Where the
allocator gives other memory, and on a CPU, only values are compared.  In a CUDA graph the guards are set anew in each
replay.  An input that is a part of a wider tensor, such as a layer's blocks of the cache, keeps what lies between its
rows, and that may not change.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tp_engine.system.units import MIB, round_up

_GUARD_BYTES = 4096  # a multiple of what allocators align to
_PATTERN = 0xA5
_GRANULE = 512  # of torch's allocator for GPUs
_MOST_PIECES, _MOST_PIECE_BYTES = 8, 64 * MIB
_PRODUCTS = {
    "linear", "mm", "matmul", "bmm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
    "scaled_dot_product_attention",
}  # fmt: skip
_EMPTY = {"empty", "empty_like", "new_empty"}
_FILLED = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}


class Guards(TorchFunctionMode):
    """Within, tensors of ``device`` lie between guards."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._held: list[torch.Tensor] = []
        self._neighbours: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        made = func(*args, **(kwargs or {}))
        if name in _PRODUCTS and made.is_cuda and made.numel() and "out" not in (kwargs or {}):
            return self.between_neighbours(lambda: func(*args, **(kwargs or {})), made)
        if name not in _EMPTY and name not in _FILLED:
            return made
        if made.device.type != self._device_type or not made.is_contiguous() or not made.numel():
            return made
        return self._guarded(made, keeps=name in _FILLED)

    def _guarded(self, made: torch.Tensor, *, keeps: bool) -> torch.Tensor:
        """``made`` in guarded memory; unless its values are to be kept, with all bits set."""
        held = torch.empty(made.nbytes + 2 * _GUARD_BYTES, dtype=torch.uint8, device=made.device)
        held.fill_(_PATTERN)
        self._held.append(held)
        inside = held[_GUARD_BYTES : _GUARD_BYTES + made.nbytes]
        inside.fill_(0xFF)
        found = inside.view(made.dtype).view(made.shape)
        return found.copy_(made) if keeps else found

    def between_neighbours(self, call: Callable[[], torch.Tensor], made: torch.Tensor) -> torch.Tensor:
        """Return what ``call`` makes, which has made ``made`` before, between guards if the allocator puts it there."""
        size = round_up(made.untyped_storage().nbytes(), _GRANULE)
        pieces = _three_in_a_row(size, made.device) if size <= _MOST_PIECE_BYTES else None
        if pieces is None:
            return made
        before, room, after = pieces
        guards = [guard.fill_(_PATTERN) for guard in (before[-_GUARD_BYTES:], after[:_GUARD_BYTES])]
        address = room.data_ptr()
        del pieces, room
        again = call()
        if again.untyped_storage().data_ptr() == address:
            self._neighbours += guards
        return again

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in guarded memory."""
        return _copied_memory(tensor, lambda memory: self._guarded(memory, keeps=True))

    def check(self) -> None:
        """Raise ``ValueError`` if a guard was written to."""
        for held in self._held:
            ends = torch.stack((held[:_GUARD_BYTES], held[-_GUARD_BYTES:]))
            if bool((ends != _PATTERN).any()):
                raise ValueError("it writes outside of its memory")
        if any(bool((guard != _PATTERN).any()) for guard in self._neighbours):
            raise ValueError("a library that it calls writes outside of its memory")


def _three_in_a_row(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Three pieces of ``size`` bytes, each of which begins where another ends; None if the allocator gives none."""
    torch.empty(3 * size, dtype=torch.uint8, device=device)  # which the allocator cuts up
    pieces: dict[int, torch.Tensor] = {}
    while len(pieces) < _MOST_PIECES:
        piece = torch.empty(size, dtype=torch.uint8, device=device)
        pieces[piece.data_ptr()] = piece
        for address in pieces:
            found = [pieces.get(address + place * size) for place in range(3)]
            if found[1] is not None and found[2] is not None:
                return pieces[address], found[1], found[2]
    return None


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """The tensors among ``inputs``, also in tuples and dataclasses among them."""
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    parts = inputs if isinstance(inputs, tuple) else _fields(inputs).values()
    return [found for one in parts for found in tensors_of(one)]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What ``tensor`` lies in, flat, from its first to its last element; what is between its rows belongs to others."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size if tensor.numel() else 0,), (1,))


def _copied_memory(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``tensor``, with its strides, in what ``copy`` makes of its memory."""
    return copy(memory_of(tensor)).as_strided(tensor.shape, tensor.stride()) if tensor.numel() else tensor.clone()


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in memory of its own, with its strides and what is between its rows."""
    return _copied_memory(tensor, torch.clone)


def copied(inputs: Any, allocate: Callable[[torch.Tensor], torch.Tensor] = clone) -> Any:
    """``inputs`` with tensors in memory of their own, as ``allocate`` makes it."""
    if isinstance(inputs, torch.Tensor):
        return allocate(inputs)
    if not isinstance(inputs, tuple):
        parts = _fields(inputs)
        return replace(inputs, **{name: copied(one, allocate) for name, one in parts.items()}) if parts else inputs
    own = [copied(one, allocate) for one in inputs]
    return type(inputs)(*own) if hasattr(inputs, "_fields") else tuple(own)


def _fields(value: Any) -> dict[str, Any]:
    """What a dataclass with tensors is made of."""
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    found = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
    return found if any(tensors_of(one) for one in found.values()) else {}
