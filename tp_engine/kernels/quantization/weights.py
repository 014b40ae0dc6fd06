"""Quantised weights: codes of 4 or 8 bits with scales, and products with them in plain PyTorch.

::

    weight[o, i] = (value(code[o, i]) - unit * zero[o, i / group]) * scale[o / row_block, i / group] * factor[o]

    int4    code - 8                           0 .. 15; zeros in sixteenths of a step: their unit is 1 / 16
    int8    the byte, signed                   zeros in steps: their unit is 1
    e4m3    1 sign, 4 exponent, 3 mantissa     torch.float8_e4m3fn
    e2m1    1 sign, 2 exponent, 1 mantissa     0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

Divisions of indices round down.  All formats of checkpoints (``layers/quantization/``) become this one; the products
here are the twins of C and Triton.

Products multiply each group's sum by its scale, in float32, so that no weight is rounded::

    sums[n, o, g] = sum over columns i of group g of x[n, i] * (value(code[o, i]) - unit * zero[o, g])
    out[n, o] = factor[o] * sum over groups g of scale[o, g] * sums[n, o, g]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import gate, widened
from tp_engine.model_config.mlp import Activation
from tp_engine.model_config.quantization import Blocks

Codes: TypeAlias = Literal["int4", "int8", "e4m3", "e2m1"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_OFFSET = 8
INT4_ZERO_PARTS = 16  # of a step


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """The blocks in which a weight's rows are rounded (``block_rows``); ``scale`` is NVFP4's, a float32 scalar, or
    (experts,) for a stack."""

    kind: Blocks
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedWeight:
    """A weight (out, in), or a stack of them (experts, out, in): all tensors then have that first dimension.

    ::

        codes     uint8 (out, in), or of 4 bits (out, in / 2), the even column in the low bits
        scales    (ceil(out / row_block), ceil(in / group)), float32, bfloat16, float16, float8_e4m3fn,
                  float8_e8m0fnu or uint8; None: no groups, all scales are 1
        zeros     int8 (out, ceil(in / group)), for int4 and int8 with scales and row_block 1; None: all are 0
        factors   float32 (out,); None: all are 1

    ``in`` is even for codes of 4 bits.  ``rows``: products round their rows in blocks first; None: they do not.
    """

    kind: Codes
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    group: int = 0
    row_block: int = 1
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    rows: RowBlocks | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in), or (experts, out, in)."""
        *outer, columns = self.codes.shape
        return (*outer, columns * values_per_byte(self.kind))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in (self.codes, self.scales, self.zeros, self.factors) if one is not None)

    def expert(self, index: int) -> QuantisedWeight:
        """One weight of a stack."""
        rows = self.rows
        if rows is not None and rows.scale is not None:
            rows = replace(rows, scale=rows.scale[index])
        return replace(self.map(lambda one: one[index]), rows=rows)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedWeight:
        """This weight with ``change`` applied to each of its tensors; ``rows`` stay."""
        return replace(
            self,
            codes=change(self.codes),
            scales=None if self.scales is None else change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
            factors=None if self.factors is None else change(self.factors),
        )


def values_per_byte(kind: Codes) -> int:
    """2 for codes of 4 bits, else 1."""
    return 2 if kind in ("int4", "e2m1") else 1


def code_values(kind: Codes, codes: torch.Tensor) -> torch.Tensor:
    """``codes`` (..., bytes) uint8 -> their values (..., in), float32."""
    if kind == "int8":
        return codes.view(torch.int8).float()
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    if kind == "int4":
        return nibbles.float() - INT4_OFFSET
    return torch.tensor(E2M1_VALUES, device=codes.device, dtype=torch.float32)[nibbles.int()]


def dequantise(weight: QuantisedWeight) -> torch.Tensor:
    """The weight's values, (out, in) or (experts, out, in), float32."""
    values = code_values(weight.kind, weight.codes)
    num_rows, num_columns = values.shape[-2:]
    if weight.scales is not None:
        if weight.zeros is not None:
            zeros = weight.zeros.float() / (INT4_ZERO_PARTS if weight.kind == "int4" else 1)
            values = values - _over_columns(zeros, weight.group, num_columns)
        scales = weight.scales.float().repeat_interleave(weight.row_block, -2).narrow(-2, 0, num_rows)
        values = values * _over_columns(scales, weight.group, num_columns)
    return values if weight.factors is None else values * weight.factors.unsqueeze(-1)


def multiply_quantised(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None, activation: Activation | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``: ``x`` (N, in), ``bias`` (out,) -> (N, out), in the type of ``x``, rounded once.  Rows
    are as they are given.

    With an ``activation``, the weight is gate rows, then up rows, and the result is ``layer_ops.gate`` of the product.
    """
    wide = widened(x)
    out = F.linear(wide, dequantise(weight).to(wide.dtype), None if bias is None else bias.to(wide.dtype)).to(x.dtype)
    return out if activation is None else gate(out, activation)


def _over_columns(of_groups: torch.Tensor, group: int, num_columns: int) -> torch.Tensor:
    return of_groups.repeat_interleave(group, -1).narrow(-1, 0, num_columns)
