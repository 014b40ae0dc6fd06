"""A layer's experts by PyTorch's grouped products of pairs sorted by expert: for many pairs, on GPUs.

::

    sort           pairs of a token and an expert, by expert
    gate and up    x of the pairs, each by its expert's weight
    down           activated gate and up, the same; outputs return to the order of the pairs

==================  ==================================================  ===================================
weights             rows                                                product
==================  ==================================================  ===================================
bfloat16            as they are                                         ``F.grouped_mm``
e4m3, a scale per   rounded to 8 bits, if the format quantises          ``torch._scaled_grouped_mm``
row                 activations                                         (``scaled_products``)
==================  ==================================================  ===================================

Shapes follow from the number of tokens alone, and nothing waits for the device.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from tp_engine.kernels.experts.experts import ExpertWeights, Weights
from tp_engine.kernels.ops import op
from tp_engine.kernels.quantization.scaled_products import grouped_scaled_product
from tp_engine.model_config.mlp import Activation

_CAPABILITY = (9, 0)


class GroupedProduct(Protocol):
    """A stack of weights (E, out, in), each applied to its own rows."""

    def __call__(
        self, x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, activation: Activation | None = None
    ) -> torch.Tensor:
        """Rows ``rows`` (M,) int64 of ``x`` (N, in), or all of them in order -> (M, out).

        ``ends`` (E,) int32: weight e has the rows from the end of the one before to ``ends[e]``; results of rows after
        the last end are undefined.  With an ``activation``, ``x`` (N, 2 * in) is gate and up.
        """


class DenseGrouped:
    """``F.grouped_mm`` of ``weight`` (E, out, in)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.transpose(1, 2)

    def __call__(
        self, x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, activation: Activation | None = None
    ) -> torch.Tensor:
        x = x if activation is None else op("gate", x.device.type)(x, activation)
        return F.grouped_mm(x if rows is None else x[rows], self._weight, offs=ends)


class GroupedExperts:
    """The experts from ``first`` on; the products have no biases."""

    def __init__(self, gate_up: GroupedProduct, down: GroupedProduct, activation: Activation, first: int) -> None:
        self._gate_up, self._down, self._activation, self._first = gate_up, down, activation, first

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
        """``x`` (N, hidden), ``expert_ids`` (N, k) int32 -> each pair's output (N * k, hidden).

        Outputs of pairs whose expert is on another rank are undefined.
        """
        local = (expert_ids.flatten() - self._first).long()
        local = torch.where((local < 0) | (local >= num_experts), num_experts, local)
        found = local.sort(stable=True)
        numbers = torch.arange(num_experts, device=x.device, dtype=torch.int64)
        ends = torch.searchsorted(found.values, numbers, right=True).to(torch.int32)
        both = self._gate_up(x, found.indices // expert_ids.shape[1], ends)
        outputs = self._down(both, None, ends, self._activation)
        return torch.empty_like(outputs).index_copy_(0, found.indices, outputs)


def dense_grouped_experts(weights: ExpertWeights[torch.Tensor]) -> GroupedExperts:
    """The products of ``weights``, without asking whether the device has them."""
    return GroupedExperts(DenseGrouped(weights.gate_up), DenseGrouped(weights.down), weights.activation, weights.first)


def grouped_experts(weights: ExpertWeights[Weights], *, quantises_activations: bool = False) -> GroupedExperts | None:
    """The grouped products of these experts on their device; None if there are none.

    ``quantises_activations``: rows may be rounded to 8 bits.
    """
    if weights.gate_up_bias is not None or weights.down_bias is not None:
        return None
    gate_up, own = weights.gate_up, weights.down
    if isinstance(gate_up, torch.Tensor) and isinstance(own, torch.Tensor):
        if own.device.type != "cuda" or own.dtype != torch.bfloat16 or own.shape[1] % 8 or own.shape[2] % 8:
            return None  # rows must have whole 16 bytes
        is_capable = torch.cuda.get_device_capability(own.device) >= _CAPABILITY
        if not is_capable:
            return None
        return GroupedExperts(DenseGrouped(gate_up), DenseGrouped(own), weights.activation, weights.first)
    if not quantises_activations or isinstance(gate_up, torch.Tensor) or isinstance(own, torch.Tensor):
        return None
    products = grouped_scaled_product(gate_up), grouped_scaled_product(own)
    if products[0] is None or products[1] is None:
        return None
    return GroupedExperts(products[0], products[1], weights.activation, weights.first)
