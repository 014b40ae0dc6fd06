"""The numbers of quantised weights: codes and scales by rounding to nearest, and the weight that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a weight (out, in) becomes, before it is packed.

    ::

        codes     (out, in): float8_e4m3fn; int32 0 .. 15 for e2m1 (bit 3 is the sign); int32 0 .. 2**bits - 1 for int
        scales    (ceil(out / block[0]), ceil(in / block[1])), in the type in which they are stored
        zeros     int32, the shape of the scales, for int: value = code - zero; None: 2**(bits - 1) everywhere
        factor    float32 (): multiplies all values
        divisor   float32 (): divides all scales
        order     int64 (in,): the place of each column among those that are sorted by their groups; None: its own
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    bits: int = 8
    zeros: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def offset(self) -> int:
        """The code of 0 without zero points."""
        return 1 << (self.bits - 1)

    @property
    def all_zeros(self) -> torch.Tensor:
        """``zeros``, or the offset everywhere."""
        return torch.full(self.scales.shape, self.offset, dtype=torch.int32) if self.zeros is None else self.zeros

    def weight(self) -> torch.Tensor:
        """The weight, float32 (out, in)."""
        if self.kind == "e4m3":
            values = self.codes.float()
        elif self.kind == "e2m1":
            signed = torch.tensor(E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES))
            values = signed[self.codes]
        else:
            values = (self.codes - _spread(self.all_zeros, self.block, self.codes)).float()
        if self.order is not None:
            sorted_ones = replace(self, codes=self.codes[:, self.order.argsort()], order=None)
            return sorted_ones.weight()[:, self.order]
        scales = self.scales.float() if self.divisor is None else self.scales.float() / self.divisor
        values = values * _spread(scales, self.block, self.codes)
        return values if self.factor is None else values * self.factor


def quantise_int(
    weight: torch.Tensor, group: int | None, *, bits: int = 4, has_zeros: bool = False, scale_type: torch.dtype
) -> Numbers:
    """Codes of ``bits`` bits with a scale, and with a zero point if ``has_zeros``, per ``group`` columns (None: all).

    Zero points are at least 1, because GPTQ's first version has no zero point 0.
    """
    block = (1, group or weight.shape[1])
    if weight.shape[1] % block[1]:
        raise ValueError(f"{weight.shape[1]} columns are no multiple of the group {group}: choose another")
    highest = 2**bits - 1
    zeros = None
    if has_zeros:
        low, high = _blocks(weight, block).amin((1, 3)).clamp(max=0), _blocks(weight, block).amax((1, 3)).clamp(min=0)
        scales = _scale((high - low) / highest, scale_type)
        zeros = (-low / scales.float()).round().clamp(1, highest).int()
        middle: torch.Tensor | int = _spread(zeros, block, weight)
    else:
        scales = _scale(_blocks(weight, block).abs().amax((1, 3)) * 2 / highest, scale_type)
        middle = 2 ** (bits - 1)
    codes = ((weight / _spread(scales.float(), block, weight)).round() + middle).clamp(0, highest).int()
    return Numbers(kind="int", codes=codes, scales=scales, block=block, bits=bits, zeros=zeros)


def quantise_ordered(weight: torch.Tensor, group: int | None, **options: Any) -> Numbers:
    """As ``quantise_int``, with columns in groups by an order of their own, as GPTQ's ``desc_act`` makes it.

    It follows from the number of columns, so that modules with the same inputs have the same.
    """
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    found = quantise_int(weight[:, order.argsort()], group, **options)
    return replace(found, codes=found.codes[:, order], order=order)


def quantise_e4m3(
    weight: torch.Tensor, block: tuple[int | None, int | None], scale_type: torch.dtype = torch.float32
) -> Numbers:
    """FP8 codes with a scale per ``block`` (None: all rows, or all columns); blocks at the edges may be smaller."""
    whole = (block[0] or weight.shape[0], block[1] or weight.shape[1])
    scales = _scale(_blocks(weight, whole).abs().amax((1, 3)) / LARGEST_E4M3, scale_type)
    scaled = weight / _spread(scales.float(), whole, weight)
    codes = scaled.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return Numbers(kind="e4m3", codes=codes, scales=scales, block=whole)


def quantise_mxfp4(weight: torch.Tensor) -> Numbers:
    """E2M1 codes with a power of two per 32 columns (OCP microscaling formats, MXFP4)."""
    block = (1, 32)
    _, exponents = torch.frexp(_blocks(weight, block).abs().amax((1, 3)))  # 2**(exponent - 1) <= largest < 2**exponent
    scales = (exponents - 1 - 2 + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)
    codes = _e2m1(weight / _spread(scales.float(), block, weight))
    return Numbers(kind="e2m1", codes=codes, scales=scales, block=block, bits=4)


def quantise_mxfp8(weight: torch.Tensor) -> Numbers:
    """E4M3 codes with a power of two per 32 columns (OCP microscaling formats, MXFP8)."""
    block = (1, 32)
    _, exponents = torch.frexp(_blocks(weight, block).abs().amax((1, 3)))
    scales = (exponents - 1 - 8 + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)
    scaled = weight / _spread(scales.float(), block, weight)
    codes = scaled.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return Numbers(kind="e4m3", codes=codes, scales=scales, block=block)


def quantise_nvfp4(weight: torch.Tensor, *, divides: bool) -> Numbers:
    """E2M1 codes, an E4M3 scale per 16 columns and one number for all, which multiplies or ``divides`` the scales."""
    block = (1, 16)
    whole = weight.abs().amax() / (LARGEST_E4M3 * LARGEST_E2M1)
    divisor = 1 / whole
    scales = (_blocks(weight, block).abs().amax((1, 3)) / LARGEST_E2M1 / whole).clamp(2**-9).to(torch.float8_e4m3fn)
    codes = _e2m1(weight / (_spread(scales.float(), block, weight) * whole))
    return Numbers(
        kind="e2m1",
        codes=codes,
        scales=scales,
        block=block,
        bits=4,
        factor=None if divides else whole,
        divisor=divisor if divides else None,
    )


def _scale(scales: torch.Tensor, scale_type: torch.dtype) -> torch.Tensor:
    return scales.clamp(min=2**-14).to(scale_type)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest codes, int32; values beyond 6 become 6."""
    distances = (values.abs().unsqueeze(-1) - torch.tensor(E2M1_MAGNITUDES)).abs()
    return distances.argmin(-1).int() + 8 * torch.signbit(values).int()


def _blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(out, in) -> (row blocks, rows, column blocks, columns); zeros fill up the last blocks."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    return padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])


def _spread(of_blocks: torch.Tensor, block: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """A number per block -> the same for each element of ``like``."""
    rows, columns = like.shape
    return of_blocks.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
