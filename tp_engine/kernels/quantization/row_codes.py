"""Rows of activations as 8-bit floats (e4m3) with scales, and products of them, in plain PyTorch.

::

    x[n, i]  ~  value(code[n, i]) * scale[n, i / group]      scale = largest magnitude of the group / 448

Each token has its own scales, so a row's result does not depend on the rest of the step.  Some checkpoints have one
scale for all activations of a layer instead.  NaN stays: the scale of a group with NaN is NaN.

The results of an activation or a norm become codes in the same pass over memory: ``quantise_rows`` with an activation,
and ``norm_codes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, dequantise, quantise
from tp_engine.kernels.layer_ops import NormRule, add_norm, gate, norm
from tp_engine.kernels.quantization.weights import QuantisedWeight, multiply_quantised
from tp_engine.model_config.mlp import Activation

CODE_DTYPE = torch.float8_e4m3fn
LARGEST_CODE = LARGEST_VALUE[CODE_DTYPE]
PRODUCT_DTYPE = torch.bfloat16  # of products of codes with codes, as the libraries' are
_LEAST_COLUMNS = 32


@dataclass(frozen=True, slots=True, eq=False)
class CodeRule:
    """How rows become codes: a scale for each ``group`` columns, or for each row (0); or ``scale``, a float32 scalar,
    for everything."""

    group: int = 0
    scale: torch.Tensor | None = None

    def is_same(self, other: CodeRule) -> bool:
        """Whether both certainly give the same codes; told without reading the device's memory."""
        return self.group == other.group and self.scale is other.scale


@dataclass(frozen=True, slots=True, eq=False)
class RowCodes:
    """Rows as ``codes`` (N, in) float8_e4m3fn and ``scales`` (N, groups) float32."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.codes)


Rows: TypeAlias = torch.Tensor | RowCodes
"""What a linear layer reads: (N, in), or its codes."""


def rule_for(weight: QuantisedWeight) -> CodeRule:
    """How rows become codes that meet the codes of ``weight``: with a scale where it has one."""
    has_groups = weight.scales is not None and weight.scales.shape[-1] > 1
    return CodeRule(group=weight.group if has_groups else 0)


def takes_codes(weight: QuantisedWeight) -> bool:
    """Whether Triton multiplies the codes of ``weight`` with those of rows: groups are whole blocks of columns,
    which units for 8-bit floats take 32 of at least."""
    group = rule_for(weight).group
    return weight.kind == "e4m3" and (group == 0 or (group & (group - 1) == 0 and group >= _LEAST_COLUMNS))


def quantise_rows(
    x: torch.Tensor, group: int = 0, scale: torch.Tensor | None = None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` (N, in) -> codes (N, in) float8_e4m3fn, scales (N, ceil(in / group)) float32, or (N, 1) if ``group`` is 0.

    ``scale``, a float32 scalar, is the scale of everything; ``group`` is then 0.  With an ``activation``, ``x``
    (N, 2 * in) is gate and up, and the rows are ``layer_ops.gate`` of it, rounded to its type.
    """
    if activation is not None:
        x = gate(x, activation)
    if scale is not None:
        codes = (x.float() / scale).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODE_DTYPE)
        return codes, scale.reshape(1, 1).expand(len(x), 1)
    num_rows, size = x.shape
    width = group or size
    padded = F.pad(x, (0, -size % width)).reshape(num_rows, -1, width)
    codes, scales = quantise(padded, CODE_DTYPE)
    return codes.reshape(num_rows, -1)[:, :size].contiguous(), scales


def norm_codes(
    x: torch.Tensor, residual: torch.Tensor | None, rule: NormRule, wanted: CodeRule, scale: float = 1.0
) -> RowCodes:
    """The codes of ``layer_ops.norm`` of ``x`` (N, size), or with a ``residual``, to which it adds, of ``add_norm``.

    The norm is rounded to the type of ``x``, as if it were stored, before it becomes codes.
    """
    rows = norm(x, rule) if residual is None else add_norm(x, residual, rule, scale)
    return RowCodes(*quantise_rows(rows, wanted.group, wanted.scale))


def rounded_rows(x: torch.Tensor, group: int = 0, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The values of ``quantise_rows``' codes, (N, in) float32."""
    codes, scales = quantise_rows(x, group, scale)
    width = group or x.shape[1]
    padded = F.pad(codes.float(), (0, -x.shape[1] % width)).reshape(len(x), -1, width)
    return dequantise(padded, scales).reshape(len(x), -1)[:, : x.shape[1]]


def multiply_rounded(
    x: torch.Tensor,
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    group: int = 0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``multiply_quantised`` of ``rounded_rows``: the twin of products of codes (W8A8)."""
    return multiply_quantised(rounded_rows(x, group, scale), weight, bias).to(x.dtype)
