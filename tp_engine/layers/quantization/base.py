"""The interface of formats: how a linear layer's weights lie on disk and in memory.

::

    create    shapes, types and sources of the parameters        before a byte is read
    finish    the loaded parameters -> a product                 once; the parameters are dropped afterwards
    product   (N, in) -> (N, out)                                in every step
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.experts.pairs import ExpertRun
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.weights.source import Source


class Product(Protocol):
    """A weight, ready to be applied.  ``is_recordable``: recordings of steps can hold it."""

    is_recordable: bool

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, out), in the type of ``x``."""


@runtime_checkable
class GatedProduct(Product, Protocol):
    """A product that ends with the activation of gate and up; adapters need what comes before it."""

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, 2 * size), gate first, from the same weight."""


class ExpertsProduct(Protocol):
    """The experts of a layer that are on this rank.  ``is_recordable``: recordings of steps can hold them."""

    is_recordable: bool

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden), ``expert_ids`` (N, k) int32 and ``weights`` (N, k) float32 -> (N, hidden), in the type of
        ``x``: the sum, in the order of k, of this rank's experts' outputs times their weights."""


@runtime_checkable
class SeparateExperts(ExpertsProduct, Protocol):
    """Experts without biases whose two products can be called separately, with adapters between them.

    Rows ``x`` (P, in) are pairs of a row and an expert, sorted by expert: ``runs`` (``kernels/experts/pairs.py``)."""

    def gate_up(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        """(P, hidden) -> (P, 2 * inner), gate first, without the activation."""

    def down(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        """(P, inner) -> (P, hidden)."""


class ParameterFactory(Protocol):
    """The part of a ``LayerContext`` that formats use."""

    def parameter(
        self, shape: Sequence[int], *sources: Sequence[Source], dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """An uninitialised weight on the layer's device, in the layer's type unless ``dtype`` is given.

        The loader fills it from one of the alternative ``sources``.
        """


class LinearFormat(Protocol):
    """One way to keep linear weights.

    Experts are shared among the ranks in whole blocks of ``experts_block`` inner elements.
    """

    @property
    def experts_block(self) -> int:
        """At least 1."""

    def create(self, context: ParameterFactory, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        """The parameters of a layer of ``shape``, by name."""

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        """The product of the loaded ``parameters``, on their device, for rows of ``dtype``.

        If ``shape`` has an activation, it is a ``GatedProduct``.  Raises ``ConfigError`` if it cannot be made.
        """

    def kept_bytes(self, name: str, weight: torch.Tensor) -> int:
        """The bytes that the product keeps of the parameter ``name``."""

    def create_experts(self, context: ParameterFactory, shape: ExpertsShape) -> Mapping[str, nn.Parameter]:
        """The parameters of a layer's experts, by name."""

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        """The product of the loaded ``parameters`` of experts, for rows of ``dtype``."""


@runtime_checkable
class TunedFormat(Protocol):
    """A format whose products have candidates."""

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        """The operation and the shape of the product of ``parameters``, which have no memory; None if it has no
        candidates there."""


@runtime_checkable
class TunedExperts(Protocol):
    """A format whose experts have candidates."""

    def tuned_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        """The operation and the shape of the experts of ``parameters``, which have no memory; None if they have no
        candidates there."""
