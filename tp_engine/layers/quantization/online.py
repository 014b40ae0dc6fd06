"""Weights that are loaded in the model's own type and quantised here, without a checkpoint of their own.

::

    fp8     a scale per row                    scale = max |w| / 448
    int4    a scale per 32 columns             see quantise_int4
    int8    a scale per row, weights alone     scale = max |w| / 127

With int4 the output head has 8 bits: errors there reach the tokens directly.  ``int8.py`` quantises activations too.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from tp_engine.kernels.experts.experts import QuantisedExpertWeights
from tp_engine.kernels.quantization.weights import INT4_OFFSET, QuantisedWeight
from tp_engine.layers.quantization.base import ExpertsProduct, Product
from tp_engine.layers.quantization.dense import Dense
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.quantised_products import choose_quantised_experts, choose_quantised_product
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.units import ceil_div

INT4_GROUP = 32
_INT4_SHARES = (1.0, 0.9)  # of the largest magnitude
_GROUPS_AT_A_TIME = 1 << 13  # 1 MiB, which stays in the caches
_SMALLEST_LARGEST = 1e-30  # keeps the scale of a row of zeros from being zero
_LARGEST_E4M3 = 448.0
_LARGEST_INT8 = 127


class Online(Dense):
    """Weights that are loaded as dense, then quantised by ``quantise``."""

    def __init__(
        self, quantise: Callable[[torch.Tensor], QuantisedWeight], *, quantises_activations: bool = False
    ) -> None:
        self._quantise, self._quantises_activations = quantise, quantises_activations

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        return choose_quantised_product(
            self._quantise(parameters["weight"].detach()),
            dtype=dtype,
            activation=shape.activation,
            quantises_activations=self._quantises_activations,
        )

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        gate_up, down = (self._quantise(parameters[name].detach()) for name in ("gate_up", "down"))
        weights = QuantisedExpertWeights(gate_up=gate_up, down=down, **shape.rest_of(parameters))
        return choose_quantised_experts(
            weights, dtype=dtype, top_k=shape.spec.rule.top_k, quantises_activations=self._quantises_activations
        )


def quantise_e4m3(weight: torch.Tensor) -> QuantisedWeight:
    """``weight`` (..., in) with a scale per row."""
    factors = weight.abs().amax(-1).float().clamp_min(_SMALLEST_LARGEST) / _LARGEST_E4M3
    codes = (weight / factors.unsqueeze(-1)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return QuantisedWeight(kind="e4m3", codes=codes.view(torch.uint8), factors=factors)


def quantise_int8(weight: torch.Tensor) -> QuantisedWeight:
    """``weight`` (..., in) with a scale per row."""
    factors = weight.abs().amax(-1).float().clamp_min(_SMALLEST_LARGEST) / _LARGEST_INT8
    codes = (weight / factors.unsqueeze(-1)).round_().to(torch.int8)
    return QuantisedWeight(kind="int8", codes=codes.view(torch.uint8), factors=factors)


def quantise_int4(weight: torch.Tensor) -> QuantisedWeight:
    """``weight`` (..., in) with a float16 scale per ``INT4_GROUP`` columns; an odd number of columns has 8 bits."""
    num_columns = weight.shape[-1]
    if num_columns % 2:
        return quantise_int8(weight)
    num_groups = ceil_div(num_columns, INT4_GROUP)
    padded = F.pad(weight, (0, num_groups * INT4_GROUP - num_columns))
    groups = torch.split(padded.reshape(-1, INT4_GROUP), _GROUPS_AT_A_TIME)
    parts = [_int4_groups(part.float()) for part in groups]
    codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    codes = codes.view(*weight.shape[:-1], -1)[..., :num_columns]
    return QuantisedWeight(
        kind="int4",
        codes=codes[..., 0::2] | codes[..., 1::2] << 4,
        scales=scales.view(*weight.shape[:-1], num_groups),
        group=INT4_GROUP,
    )


def _int4_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 (N, ``INT4_GROUP``) and scales float16 (N, 1) of ``groups``, float32.

    The weight of the largest magnitude gets code -8, so that all 16 codes occur, or is clipped a little.  For each such
    choice of codes the best scale follows from the sum of ``|w| * error ** 2``, and the best choice is kept.  Without
    the factor ``|w|`` large weights are clipped too much, and perplexities rise (docs/benchmarks.md).

    Every device chooses the same codes and scales: of two weights of the largest magnitude the positive one counts, and
    sums are in float64, so that the order of their terms does not change what is rounded to float16.
    """
    magnitudes = groups.abs()
    highest, lowest = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    largest = torch.where(highest >= -lowest, highest, lowest)
    best, scales = torch.full_like(largest, -1, dtype=torch.float64), torch.zeros_like(largest, dtype=torch.float64)
    for share in _INT4_SHARES:
        codes = _int4_codes(groups, largest * (share / -INT4_OFFSET))
        weighted = magnitudes * codes
        products, squares = (_exact_sum(weighted * factor) for factor in (groups, codes))
        fit = products * _inverse(squares)
        gain = fit * products  # what these codes take away from the error of zeros
        scales = torch.where(gain > best, fit, scales)
        best = torch.maximum(gain, best)
    scales = scales.half()
    return _int4_codes(groups, scales.float()).add_(INT4_OFFSET).to(torch.uint8), scales


def _exact_sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(-1, keepdim=True, dtype=torch.float64)


def _int4_codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (groups * _inverse(scales)).round_().clamp_(-INT4_OFFSET, INT4_OFFSET - 1)


def _inverse(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, 1.0 / values)
