"""Bytes of tensors that live at once, counted exactly; a process's resident memory depends on its allocator, too.

So the memory of an image that would take minutes on a CPU is known from a small one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tp_engine.models.vision_tower import VisionTower
from tp_engine.system.units import ceil_div

_ROWS = 256  # of an image that is encoded in a blink


class LiveBytes(TorchDispatchMode):
    """Counts the tensors that operations make within this context: ``now`` bytes live, and ``peak`` lived at once.

    What operations allocate for themselves is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler, which takes a second or two."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors_in((*args, *(kwargs or {}).values()))}
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors_in([found]):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage not in self._known:
                self._known.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return found

    def _count(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@torch.inference_mode()
def largest_image_bytes(tower: VisionTower) -> int:
    """Return the bytes of tensors that live at once on a CPU while the largest image is encoded, and hardly more.

    Those of a smaller image are counted: all grow with the number of patches, or not at all.
    """
    spec = tower.spec
    side = int(min(spec.most_rows, _ROWS) ** 0.5) * spec.cell
    with tower.shortened(), LiveBytes() as live:
        tower(torch.zeros((side, side, 3), dtype=torch.uint8, device="cpu"))
    return ceil_div(live.peak * spec.most_rows * spec.cell**2, side * side)


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
