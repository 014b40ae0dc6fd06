"""Rows of activations in blocks: short codes, with a scale of 8 bits for each 16 or 32 columns, in plain PyTorch.

::

    x[n, i]  ~  value(code[n, i]) * block_scale[n, i / group] * scale

    nvfp4    e2m1, in groups of 16    block_scale = e4m3(largest / 6 / scale); ``scale`` is the checkpoint's
    mxfp4    e2m1, in groups of 32    block_scale = a power of two, so that the largest magnitude is less than 7
    mxfp8    e4m3, in groups of 32    the same with 448

Codes are rounded to the nearest, of two to the even one; what is beyond the largest becomes the largest.  A power of
two is the largest magnitude's own, or the next one from 1.75 times it on, divided by that of the largest code: a
rule of compressed-tensors and of Quark, which for MXFP8 rounds up, as NVIDIA's libraries do.  A group with NaN or an
infinity is NaN.  Where a rank's share begins inside of a group, groups are counted from there.

``scale`` is one number for all rows, or (N * k,), where experts have one each: a row then becomes k, in order.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, code_values
from tp_engine.model_config.quantization import Blocks
from tp_engine.system.units import ceil_div

LARGEST_SCALE = 448.0  # of e4m3
NAN_SCALE = {"e4m3": 0x7F, "e8m0": 0xFF}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Codes, columns of a scale, the types of scales, and the largest code, whose power of two is 2 ** ``exponent``."""

    codes: Codes
    group: int
    scales: Literal["e4m3", "e8m0"]
    largest: float
    exponent: int

    @property
    def scale_type(self) -> torch.dtype:
        """The type of scales in PyTorch."""
        return torch.float8_e4m3fn if self.scales == "e4m3" else torch.float8_e8m0fnu

    @property
    def per_byte(self) -> int:
        """Codes of a byte."""
        return 2 if self.codes == "e2m1" else 1


BLOCK_FORMATS: dict[Blocks, BlockFormat] = {
    "nvfp4": BlockFormat("e2m1", 16, "e4m3", 6.0, 2),
    "mxfp4": BlockFormat("e2m1", 32, "e8m0", 6.0, 2),
    "mxfp8": BlockFormat("e4m3", 32, "e8m0", 448.0, 8),
}


def has_blocks(weight: QuantisedWeight, kind: Blocks) -> bool:
    """Whether ``weight`` is in the blocks of ``kind``, none of which this rank's share cuts."""
    form, scales = BLOCK_FORMATS[kind], weight.scales
    is_alike = (weight.kind, weight.group, weight.row_block) == (form.codes, form.group, 1) and weight.zeros is None
    return is_alike and scales is not None and scales.dtype == form.scale_type


def encode_rows(x: torch.Tensor, kind: Blocks, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` (N, in) -> codes uint8 (N, in), or of 4 bits (N, in / 2) with the even column in the low bits; and scales
    uint8 (N, ceil(in / group)).  ``scale`` is NVFP4's, float32; ``in`` is even for codes of 4 bits."""
    if scale is not None and scale.dim():
        x, scale = x.repeat_interleave(len(scale) // max(len(x), 1), 0), scale[:, None, None]
    form, (num_rows, size) = BLOCK_FORMATS[kind], x.shape
    groups = F.pad(x.float(), (0, -size % form.group)).reshape(num_rows, ceil_div(size, form.group), form.group)
    largest = groups.abs().amax(-1, keepdim=True)
    scales, values = _scales(largest, form, scale)
    quotients = torch.where(values == 0, 0, groups.abs() / values).clamp(max=form.largest).copysign(groups)
    quotients = torch.where(largest < torch.inf, quotients, 0)
    codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8) if form.codes == "e4m3" else _e2m1_codes(quotients)
    codes = codes.flatten(1)[:, :size]
    if form.per_byte == 2:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes.contiguous(), scales.squeeze(-1)


def round_rows(x: torch.Tensor, kind: Blocks, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The values of ``encode_rows``, rounded to the type of ``x``."""
    return rounded_rows(x, kind, scale).to(x.dtype)


def rounded_rows(x: torch.Tensor, kind: Blocks, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The values of ``encode_rows``, float32."""
    form, size = BLOCK_FORMATS[kind], x.shape[1]
    codes, scales = encode_rows(x, kind, scale)
    values = scales.view(form.scale_type).float()
    values = values if scale is None else values * scale.unsqueeze(-1)
    return code_values(form.codes, codes) * values.repeat_interleave(form.group, 1)[:, :size]


def _scales(largest: torch.Tensor, form: BlockFormat, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of groups as bytes, and what values are divided by."""
    if form.scales == "e4m3":
        assert scale is not None, "NVFP4 has a scale for all rows"
        stored = (largest / form.largest / scale).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
        found, values = stored.view(torch.uint8), stored.float() * scale
    else:
        bits = largest.view(torch.int32) + (1 << 21)  # a quarter of a power of two
        found = ((bits >> 23) - form.exponent).clamp(0, 254).to(torch.uint8)
        values = found.view(torch.float8_e8m0fnu).float()
    return torch.where(largest < torch.inf, found, NAN_SCALE[form.scales]).to(torch.uint8), values


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The codes of ``values``, none of them NaN or beyond 6."""
    size = values.abs()
    codes = (size > 0.25).to(torch.uint8)
    for border, goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += (size >= border) if goes_up else (size > border)
    return codes | torch.signbit(values).to(torch.uint8) << 3
