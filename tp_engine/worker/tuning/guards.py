"""Memory that shows what a candidate does to it: what it leaves unwritten, and what it writes outside.

::

    guard | the tensor, all bits set: NaN | guard         each allocation, while ``Guards`` are active

Only what is allocated by name (``torch.empty`` and its like) is guarded, as the outputs and workspaces of our kernels
are; a library's own outputs are not.  In a CUDA graph the guards are set anew in each replay.  An input that is a part
of a wider tensor, such as a layer's blocks of the cache, keeps what lies between its rows, and that may not change.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GUARD_BYTES = 4096  # a multiple of what allocators align to
_PATTERN = 0xA5
_EMPTY = {"empty", "empty_like", "new_empty"}
_FILLED = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}


class Guards(TorchFunctionMode):
    """Within, tensors of ``device`` lie between guards."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._held: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
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

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in guarded memory."""
        return _copied_memory(tensor, lambda memory: self._guarded(memory, keeps=True))

    def check(self) -> None:
        """Raise ``ValueError`` if a guard was written to."""
        for held in self._held:
            ends = torch.stack((held[:_GUARD_BYTES], held[-_GUARD_BYTES:]))
            if bool((ends != _PATTERN).any()):
                raise ValueError("it writes outside of its memory")


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
