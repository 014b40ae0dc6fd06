"""Weights that are loaded in the model's own type and quantised here, for checkpoints that are not quantised.

::

    fp8     a scale per row                    scale = max |w| / 448
    int4    a scale and a zero per 32 columns  see quantise_int4
    int8    a scale per row, weights alone     scale = max |w| / 127

With int4 the output head has 8 bits: errors there reach the tokens directly.  ``int8.py`` quantises activations too.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch

from tp_engine.kernels.candidates import DEFAULTS, Choices, Wanted
from tp_engine.kernels.experts.experts import ExpertWeights, Weights
from tp_engine.kernels.experts.experts_candidates import NAME as EXPERTS
from tp_engine.kernels.quantization.linear_candidates import NAME as QUANTISED
from tp_engine.kernels.quantization.linear_candidates import shape_of as quantised_shape
from tp_engine.kernels.quantization.weights import INT4_OFFSET, INT4_ZERO_PARTS, QuantisedWeight
from tp_engine.layers.quantization.base import ExpertsProduct, Product
from tp_engine.layers.quantization.dense import Dense, choose_experts, experts_shape
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.quantised_products import choose_quantised_product
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.system.units import ceil_div

INT4_GROUP = 32
_LEAST_VARIED = 1e-5  # of the mean square of a group's codes; below it they count as equal
_GROUPS_AT_A_TIME = 1 << 13  # 1 MiB, which stays in the caches
_SMALLEST_LARGEST = 1e-30  # keeps the scale of a row of zeros from being zero
_LARGEST_E4M3 = 448.0
_LARGEST_INT8 = 127
_LARGEST_UINT8 = 255


class Online(Dense):
    """Weights that are loaded as dense, then quantised by ``quantise``."""

    def __init__(
        self,
        quantise: Callable[[torch.Tensor], QuantisedWeight],
        *,
        quantises_activations: bool = False,
        choices: Choices = DEFAULTS,
    ) -> None:
        super().__init__(choices=choices)
        self._quantise, self._quantises_activations = quantise, quantises_activations

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        return choose_quantised_product(
            self._quantise(parameters["weight"].detach()),
            dtype=dtype,
            activation=shape.activation,
            quantises_activations=self._quantises_activations,
            choices=self.choices,
        )

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        weight = parameters["weight"]
        quantised = self._quantise(weight[:1].detach())
        row = quantised_shape(quantised, dtype, shape.activation, rounds_rows=self._quantises_activations)
        return (QUANTISED, {**row, "out": len(weight)}) if device_type == "cuda" else None

    def kept_bytes(self, name: str, weight: torch.Tensor) -> int:
        if name not in ("weight", "gate_up", "down"):
            return weight.nbytes
        columns = weight.shape[-1]
        return _bytes_of_row(self._quantise, columns, weight.dtype) * (weight.numel() // columns)

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        gate_up, down = (self._quantise(parameters[name].detach()) for name in ("gate_up", "down"))
        weights: ExpertWeights[Weights] = ExpertWeights(gate_up=gate_up, down=down, **shape.rest_of(parameters))
        return choose_experts(
            weights, shape.spec, dtype, quantises_activations=self._quantises_activations, choices=self.choices
        )

    def tuned_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        if device_type != "cuda":
            return None
        # A row of an expert stands for all, because each is quantised by itself.
        gate_up, down = (self._quantise(parameters[name][:1, :1].detach()) for name in ("gate_up", "down"))
        weights: ExpertWeights[Weights] = ExpertWeights(gate_up=gate_up, down=down, **shape.rest_of(parameters))
        of_row = experts_shape(weights, shape.spec, dtype, quantises_activations=self._quantises_activations)
        num_experts, hidden, _ = parameters["down"].shape
        return EXPERTS, {**of_row, "experts": num_experts, "hidden": hidden}


@cache
def _bytes_of_row(quantise: Callable[[torch.Tensor], QuantisedWeight], columns: int, dtype: torch.dtype) -> int:
    """Bytes of a quantised row; each row is quantised by itself."""
    return quantise(torch.empty(1, columns, dtype=dtype, device="meta")).num_bytes


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
    """``weight`` (..., in) with a scale and a zero of 8 bits per ``INT4_GROUP`` columns, and a factor per row; with an
    odd number of columns ``quantise_int8``."""
    num_columns = weight.shape[-1]
    if num_columns % 2:
        return quantise_int8(weight)
    num_groups, rows = ceil_div(num_columns, INT4_GROUP), weight.reshape(-1, num_columns)
    size = max(min(_GROUPS_AT_A_TIME // num_groups, len(rows)), 1), num_groups, INT4_GROUP
    room = (
        torch.zeros((6, *size), device=weight.device, dtype=torch.float32),
        torch.empty(size, dtype=torch.float64, device=weight.device),
    )
    parts = (_int4_rows(some, *room) for some in rows.split(size[0]))
    codes, scales, zeros, factors = (torch.cat(part) for part in zip(*parts, strict=True))
    outer = weight.shape[:-1]
    return QuantisedWeight(
        kind="int4",
        codes=codes.view(*outer, -1),
        scales=scales.view(*outer, -1),
        group=INT4_GROUP,
        zeros=zeros.view(*outer, -1),
        factors=factors.view(outer),
    )


def _int4_rows(rows: torch.Tensor, room: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``rows`` (N, in) as codes of two columns uint8 (N, in / 2), scales uint8 and zeros int8 (N, groups), and factors
    float32 (N,).

    Equal steps between a group's lowest and highest weight give each weight a code.  With these codes, the best step
    and zero follow from least squares.  Errors are weighted by ``|w|`` plus the group's mean of it: without the first,
    large weights are clipped too much, and without the second, those near zero do not count (docs/benchmarks.md).
    Symmetric codes, one of which is zero, replace these where their sum of squared errors is smaller, as for pruned
    weights.

    Every device finds the same numbers: sums are in float64, so that the order of their terms does not change what is
    rounded.  ``room`` (6, N or more, groups, ``INT4_GROUP``) float32 and ``wide``, one such part in float64, are
    memory for the calculation: new memory would cost page faults.  Columns of ``room`` beyond the rows' end are zero.
    """
    groups, shares, codes, symmetric, weighted, product = room[:, : len(rows)]

    def total(values: torch.Tensor) -> torch.Tensor:
        return wide[: len(rows)].copy_(values).sum(-1, keepdim=True)

    def total_of_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return total(torch.mul(one, other, out=product))

    groups.flatten(1)[:, : rows.shape[1]] = rows
    lowest, highest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    magnitude = total(torch.abs(groups, out=shares))
    shares += (magnitude / INT4_GROUP).float()
    share, weight = 2 * magnitude, total_of_product(shares, groups)

    steps = (highest - lowest) / (2 * INT4_OFFSET - 1)
    _int4_codes(groups, steps, _rounded_zeros(-INT4_OFFSET - lowest * _inverse(steps)), codes)
    code = total(torch.mul(shares, codes, out=weighted))
    code_code, code_weight = (total_of_product(weighted, other) for other in (codes, groups))
    varied, fit = share * code_code - code * code, share * code_weight - code * weight
    is_fit = (varied > _LEAST_VARIED * share * code_code) & (fit > 0)
    fit = torch.where(is_fit, fit * _inverse(varied), steps.double())
    zeros = _rounded_zeros((code * fit - weight) * _inverse(share * fit)).float()
    fit = (code_weight - zeros * weight) * _inverse(code_code - zeros * (2 * code - zeros * share))

    middle = -(highest >= -lowest).float()  # the codes on its sides reach the largest weight and 7 / 8 of it
    _int4_codes(groups, torch.maximum(highest, -lowest) / INT4_OFFSET, middle, symmetric).sub_(middle)
    torch.mul(shares, symmetric, out=weighted)
    symmetric_fit = total_of_product(weighted, groups) * _inverse(total_of_product(weighted, symmetric))
    errors, symmetric_errors = (
        values.mul_(step.float()).sub_(groups).square_()
        for values, step in ((codes.sub_(zeros), fit), (symmetric, symmetric_fit))
    )
    is_symmetric = total(errors.sub_(symmetric_errors)) > 0
    fit, zeros = torch.where(is_symmetric, symmetric_fit, fit), torch.where(is_symmetric, middle, zeros)

    factors = fit.amax(1, keepdim=True) / _LARGEST_UINT8
    scales = (fit * _inverse(factors)).round().clamp(min=1)
    _int4_codes(groups, (scales * factors).float(), zeros, codes).add_(INT4_OFFSET)
    found = codes.flatten(1)[:, : rows.shape[1]].to(torch.uint8)
    return (
        found[:, 0::2] | found[:, 1::2] << 4,
        scales.squeeze(-1).to(torch.uint8),
        (zeros * INT4_ZERO_PARTS).squeeze(-1).to(torch.int8),
        factors.flatten().float(),
    )


def _rounded_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """``zeros``, in steps, rounded to what 8 bits hold."""
    return (zeros * INT4_ZERO_PARTS).round().clamp(-128, 127) / INT4_ZERO_PARTS


def _int4_codes(groups: torch.Tensor, steps: torch.Tensor, zeros: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Signed, float32, in ``out``."""
    return torch.mul(groups, _inverse(steps), out=out).add_(zeros).round_().clamp_(-INT4_OFFSET, INT4_OFFSET - 1)


def _inverse(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, 1.0 / values)
