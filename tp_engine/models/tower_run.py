"""One image on its way through a vision tower, some layers at a time, with the bits of a single call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tp_engine.models.vision_tower import VisionTower


class TowerRun:
    """``pixels`` (height, width, 3) uint8 on their way.

    Each ``advance`` calls the tower anew, so that it works with every tower that transformers has: layers that have run
    give what the last of them gave, and the first one too many ends the call.  What is not a layer runs again, but for
    the modules that the tower names (``VisionTower.beside_layers``), whose work is worth keeping.
    """

    def __init__(self, tower: VisionTower, pixels: torch.Tensor) -> None:
        self._tower, self._pixels = tower, pixels
        self._num_done = self._until = 0
        self._last: Any = None  # what the last layer that has run gave
        self._kept: dict[str, torch.Tensor] = {}

    def advance(self, num_layers: int) -> torch.Tensor | None:
        """Run that many layers; return the image's rows (n, width) after the last one, else None."""
        self._until = self._num_done + num_layers
        try:
            with self._intercepted():
                rows: torch.Tensor = self._tower(self._pixels)
        except _CutError:
            return None
        return rows

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Within, this run stands between the tower and its modules."""
        layers = {layer: partial(self._layer, index, layer.forward) for index, layer in enumerate(self._tower.stack)}
        beside = {one: partial(self._beside, path, one.forward) for path, one in self._tower.beside_layers().items()}
        before = {module: vars(module).get("forward") for module in (*layers, *beside)}
        for module, ours in {**layers, **beside}.items():
            module.forward = ours
        try:
            yield
        finally:
            for module, own in before.items():
                del module.forward
                if own is not None:
                    module.forward = own

    def _layer(self, index: int, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if index < self._num_done:
            return self._last
        if index == self._until:
            raise _CutError
        self._last = forward(*given, **named)
        self._num_done = index + 1
        return self._last

    def _beside(self, path: str, forward: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
        found = self._kept.get(path)
        if found is None:
            found = forward(*given, **named)
            is_read_once = path == self._tower.embeds  # by the first layer, which runs at once: its shape stays
            self._kept[path] = found.new_zeros(()).expand(found.shape) if is_read_once else found
        return found


class _CutError(Exception):
    """Ends the tower's call: this step's layers have run."""
