"""The interface of formats: how a linear layer's weights lie on disk and in memory.

::

    create    shapes, types and sources of its parameters        before a byte is read
    finish    those parameters, loaded -> a product              once; the parameters are dropped afterwards
    product   (N, in) -> (N, out)                                in every step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tp_engine.layers.context import LayerContext
from tp_engine.layers.formats.experts import ExpertsShape
from tp_engine.model_config.mlp import Activation
from tp_engine.weights.source import Decode, Source, Span, as_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a product that come from one stored module: ``rows`` of the ``stored_rows`` of module ``name``.

    They fill the first of ``room`` rows; the rest are zero.  ``order`` decodes them.
    """

    name: str
    stored_rows: int
    rows: Span
    room: int
    order: Decode = as_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One product on this rank: its ``parts`` one above the other, ``columns`` of their ``stored_columns``.

    With an ``activation``, the parts are gate and up, and the product ends with the activation of both.
    """

    stored_columns: int
    columns: Span
    parts: tuple[Part, ...]
    activation: Activation | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.room for part in self.parts)

    def sources(self, tensor: str, *, is_vector: bool = False) -> tuple[Source, ...]:
        """The sources of the stored modules' ``tensor``, which has one row, or one value, for each output."""
        sources, first = [], 0
        for part in self.parts:
            target = Span(first, part.rows.size)
            sources.append(
                Source(
                    name=f"{part.name}.{tensor}",
                    shape=(part.stored_rows,) if is_vector else (part.stored_rows, self.stored_columns),
                    taken=(part.rows,) if is_vector else (part.rows, self.columns),
                    target=(target,) if is_vector else (target, Span(0, self.columns.size)),
                    decode=part.order,
                )
            )
            first += part.room
        return tuple(sources)


class Product(Protocol):
    """A weight that is ready to be applied.  ``is_recordable``: whether recordings of steps can hold it."""

    is_recordable: bool

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, out), in the type of ``x``."""


class ExpertsProduct(Protocol):
    """The experts of a layer that are on this rank.  ``is_recordable``: whether recordings of steps can hold them."""

    is_recordable: bool

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden), ``expert_ids`` (N, k) int32 and ``weights`` (N, k) float32 -> (N, hidden), in the type of
        ``x``: the sum, in the order of k, of this rank's experts' outputs times their weights."""


class LinearFormat(Protocol):
    """One way to keep linear weights."""

    def create(self, context: LayerContext, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        """The parameters of a layer of ``shape``, by name."""

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape) -> Product:
        """The product of the loaded ``parameters``, on their device.  Raises ``ConfigError`` if it can not be made."""

    def create_experts(self, context: LayerContext, shape: ExpertsShape) -> Mapping[str, nn.Parameter]:
        """The parameters of a layer's experts, by name."""

    def finish_experts(self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape) -> ExpertsProduct:
        """The product of the loaded ``parameters`` of experts."""
