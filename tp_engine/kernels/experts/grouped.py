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
from tp_engine.kernels.quantization.scaled_products import ScaledGroupedProduct, has_grouped_product
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


def dense_grouped_experts(weights: ExpertWeights[Weights]) -> GroupedExperts:
    """The products of unquantised ``weights``, without looking whether the device has them."""
    assert isinstance(weights.gate_up, torch.Tensor) and isinstance(weights.down, torch.Tensor)
    return GroupedExperts(DenseGrouped(weights.gate_up), DenseGrouped(weights.down), weights.activation, weights.first)


def grouped_experts(weights: ExpertWeights[Weights]) -> GroupedExperts:
    """The grouped products of ``weights`` that have them (``why_no_grouped``)."""
    if isinstance(weights.gate_up, torch.Tensor):
        return dense_grouped_experts(weights)
    assert not isinstance(weights.down, torch.Tensor)
    products = ScaledGroupedProduct(weights.gate_up), ScaledGroupedProduct(weights.down)
    return GroupedExperts(*products, weights.activation, weights.first)


def why_no_grouped(weights: ExpertWeights[Weights], device: torch.device, *, rounds_rows: bool) -> str | None:
    """Why experts like these have no grouped products on ``device``.

    ``rounds_rows``: rows may be rounded to 8 bits.
    """
    if weights.gate_up_bias is not None or weights.down_bias is not None:
        return "the library's products have no biases"
    both = weights.gate_up, weights.down
    if isinstance(both[0], torch.Tensor) and isinstance(both[1], torch.Tensor):
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
            return "it needs a GPU of compute capability 9.0"
        is_aligned = both[1].dtype == torch.bfloat16 and not both[1].shape[1] % 8 and not both[1].shape[2] % 8
        return None if is_aligned else "it needs rows of whole 16 bytes, in bfloat16"
    if not rounds_rows:
        return "the library multiplies no values with codes"
    has_both = all(not isinstance(one, torch.Tensor) and has_grouped_product(one, device) for one in both)
    return None if has_both else "PyTorch has no such product here, or it is wrong"
