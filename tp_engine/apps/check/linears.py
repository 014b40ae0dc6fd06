"""Each linear layer of each rank, compared with the rank's own rows times the stored weights, in float32.

A layer is judged by the rows that it really got, so that an error does not come from a layer before it.  Which rows and
columns of a stored weight a rank has is what the engine says; that the ranks have all of them is checked too.  Which of
two parts an activation is for follows from the checkpoint: from their names, or the order of the rows of one weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from tp_engine.apps.check.answers import Ids
from tp_engine.apps.check.oracle import ROUTERS
from tp_engine.apps.check.rounding import Round, Rounding, keep
from tp_engine.apps.check.stored import StoredWeights
from tp_engine.apps.check.watched import Watched

_Parts: TypeAlias = Sequence[tuple[Any, str]]
"""A linear layer's parts, as ``LayerWatch`` describes them, with the names of their weights."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "moe")
"""Names of a layer's MLP in transformers, and of the first part of its modules' names."""
_GATES = ("gate_proj", "w1", "gate_up_proj")
_NO_TEXT = ("vision", "visual", "audio", "image", "mtp")


@dataclass(frozen=True, slots=True)
class LinearFault:
    """A product that is wrong: ``error`` relative to its size, at most ``bound`` would be right."""

    layer: int
    module: str
    rank: int
    position: int
    error: float
    bound: float
    is_quantised: bool

    @property
    def place(self) -> str:
        return f"layer {self.layer}, {self.module}, rank {self.rank}, position {self.position}"


class Linears:
    """Compares what the ranks recorded with the weights of ``stored``.

    ``activation`` is that of the gate, or of up without one; ``rounding`` is the engine's; ``floor`` is the relative
    error that float32 itself may have; ``wide`` are the last names of modules whose products stay in float32.
    """

    def __init__(
        self,
        stored: StoredWeights,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor],
        rounding: Rounding,
        floor: float,
        wide: frozenset[str] = frozenset(),
    ) -> None:
        self._stored, self._activation, self._floor, self._wide = stored, activation, floor, wide
        self._rounding = rounding
        self._names = {below_layers(name): name for name in stored.names if not any(one in name for one in _NO_TEXT)}
        self.num_compared = self.num_quantised = 0
        self.largest_ratio = 0.0

    def faults(self, watched: Watched) -> Iterator[LinearFault]:
        """Yield the products beyond their bounds, in the order of layers; rank by rank."""
        names = sorted(watched.layouts[0], key=_order)
        for name in names:
            for rank, (arrays, layouts) in enumerate(zip(watched.arrays, watched.layouts, strict=True)):
                if name in layouts:
                    fault = self._fault(name, rank, arrays, layouts[name], watched.linear_positions)
                    if fault is not None:
                        yield fault

    def _fault(
        self, name: str, rank: int, arrays: Mapping[str, Any], layout: Mapping[str, Any], positions: Ids
    ) -> LinearFault | None:
        x, y = (torch.from_numpy(arrays[f"linears.{name}.{one}"]) for one in "xy")
        stored = [self._names.get(below_layers(part["name"]) + ".weight") for part in layout["parts"]]
        if None in stored:
            return None
        parts = [(part, str(one)) for part, one in zip(layout["parts"], stored, strict=True)]
        weights = [self._stored.read(one) for _, one in parts]
        exact = self._product(x, parts, weights, layout, rank)
        is_quantised = any(self._stored.is_quantised(one) for _, one in parts)
        self.num_compared, self.num_quantised = self.num_compared + 1, self.num_quantised + is_quantised
        size = exact.norm(dim=1).clamp_min(1e-30)
        errors, bound = (y - exact).norm(dim=1) / size, self._floor
        module = ", ".join(dict.fromkeys(_short(part["name"]) for part, _ in parts))
        if not self._rounding.is_exact and not self._wide & {part["name"].rpartition(".")[2] for part, _ in parts}:
            own, in_dtype = self._rounding, self._rounding.in_dtype
            is_router = any(part["name"].endswith(ROUTERS) for part, _ in parts)
            rows, of_weights = (keep, keep) if is_router else (own.rows, own.weights)
            rounded_weights = [in_dtype(of_weights(one)) for one in weights]
            rounded = self._product(rows(in_dtype(x)), parts, rounded_weights, layout, rank, in_dtype)
            bound = max(self._floor, 1.5 * float(((rounded - exact).norm(dim=1) / size).max()))
        worst = int(errors.argmax())
        error = float("inf") if bool(errors.isnan().any()) else float(errors[worst])
        self.largest_ratio = max(self.largest_ratio, error / bound)
        if error <= bound:
            return None
        if len(parts) > 1 and not layout["is_activated"]:
            module = self._worst_part(y - exact, parts)
        position = int(positions[worst]) if len(errors) == len(positions) else worst
        return LinearFault(layer_of(name), module, rank, position, error, bound, is_quantised)

    def _product(
        self,
        x: torch.Tensor,
        parts: _Parts,
        weights: Sequence[torch.Tensor],
        layout: Mapping[str, Any],
        rank: int,
        store: Round = keep,
    ) -> torch.Tensor:
        """The product, each of whose results is rounded by ``store``."""
        begin, end = layout["columns"]
        is_whole = end - begin == layout["stored_columns"]
        found = []
        pairs = list(zip(parts, weights, strict=True))
        if layout["is_activated"]:
            pairs.sort(key=lambda pair: _gate_first(pair[0]))
        for (part, name), weight in pairs:
            weight = weight.reshape(part["stored_rows"], -1)[:, begin:end]
            rows = torch.tensor(part["rows"], dtype=torch.int64, device="cpu")
            y = x[:, : end - begin] @ weight[rows].T
            bias = name.removesuffix(".weight") + ".bias"
            if bias in self._stored.names and (is_whole or rank == 0):
                y = y + self._stored.read(bias)[rows]
            found.append(torch.nn.functional.pad(store(y), (0, part["room"] - len(rows))))
        if layout["is_activated"]:
            activated = store(self._activation(found[0]))
            return activated if len(found) == 1 else store(activated * found[1])
        return torch.cat(found, 1)

    @staticmethod
    def _worst_part(differences: torch.Tensor, parts: _Parts) -> str:
        rooms = [part["room"] for part, _ in parts]
        sizes = [float(one.norm()) / room**0.5 for one, room in zip(differences.split(rooms, 1), rooms, strict=True)]
        return _short(parts[int(np.argmax(sizes))][0]["name"])


def _gate_first(part: tuple[Any, str]) -> tuple[bool, int]:
    """The order of the parts of an activated product: the gate by its name, or the first rows of what holds both."""
    layout, name = part
    return name.rpartition(".weight")[0].rpartition(".")[2] not in _GATES, min(layout["rows"], default=0)


def below_layers(name: str) -> str:
    """A module's name from its layer's number on: ``model.language_model.layers.3.mlp.up_proj`` ->
    ``3.mlp.up_proj``; other names as they are."""
    found = _LAYER.search(name)
    return name if found is None else f"{found[1]}.{name[found.end() :]}"


def _short(name: str) -> str:
    return below_layers(name).partition(".")[2]


def layer_of(name: str) -> int:
    """The number of the layer that a module is in; -1 for others."""
    found = _LAYER.search(name)
    return -1 if found is None else int(found[1])


def _order(name: str) -> tuple[int, bool, str]:
    """Layers in order, and attention before the MLP."""
    return layer_of(name), "mlp" in name, name
