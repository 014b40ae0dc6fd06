"""Products with quantised weights in C: codes and scales in panels (``quantised.h``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tp_engine.cpu.layout import DTYPE_CODES, QuantisedLayout
from tp_engine.cpu.linear import Panels
from tp_engine.kernels import huge_pages
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, code_values, values_per_byte
from tp_engine.model_config.mlp import Activation

# As in quantised.h.
_SIGNED = 2
_CODES: dict[Codes, int] = {"int4": 0, "e2m1": 0, "int8": 1, "e4m3": _SIGNED}
_SCALES = DTYPE_CODES | {torch.float8_e4m3fn: 3, torch.float8_e8m0fnu: 4, torch.uint8: 5}
_VECTOR_SCALES, _NO_SCALES = 6, 7
_BYTES_PER_WORD = 4
_SIGN = _LOWEST_INT8 = 0x80  # of a byte; -128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedCodes:
    """A stack of weights as ``quantised.h`` has them: ``panels`` (weights, panels, bytes) uint8, and ``factors``
    (weights, panels, outputs of a panel) float32 or None."""

    form: ctypes._Pointer[QuantisedLayout]
    panels: torch.Tensor
    factors: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return self.panels.nbytes + (0 if self.factors is None else self.factors.nbytes)


class QuantisedPanels(Panels):
    """``multiply_quantised`` by a weight (out, in) in C; it keeps a packed copy, not ``weight``.

    ``dtype``, one of ``DTYPE_CODES``, is that of x, the bias and the result.
    """

    made_by = "C"  # for ``tp-engine doctor``

    def __init__(
        self, library: ctypes.CDLL, weight: QuantisedWeight, dtype: torch.dtype, activation: Activation | None = None
    ) -> None:
        super().__init__(library, dtype, weight.shape[0], activation, dtype)
        self._packed = pack_quantised(library, weight.map(lambda one: one.unsqueeze(0)), dtype, self._num_parts)
        self._row_bytes = library.quantised_row_bytes(self._packed.form, dtype)
        self.num_bytes = self._packed.num_bytes

    def _run(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, kind: int) -> None:
        packed, rows = self._packed, x.shape[0]
        prepared = torch.empty(rows * self._row_bytes, dtype=torch.uint8, device="cpu")
        self._library.quantised_linear(
            packed.form, x, x.stride(0), packed.panels, packed.factors, bias, out, prepared, rows, self._out_size, kind,
            *self._bounds, x.dtype,
        )  # fmt: skip


def pack_quantised(library: ctypes.CDLL, weights: QuantisedWeight, dtype: torch.dtype, num_parts: int) -> PackedCodes:
    """Return a stack of weights in panels, for x of ``dtype``; ``num_parts`` 2 for gate and up."""
    num_weights, out_size, num_columns = weights.shape
    assert out_size % num_parts == 0, f"gate and up have {out_size} rows, an odd number"
    weights = _in_short_groups(weights, library.max_group())
    codes, scales, zeros = _in_whole_words(weights), weights.scales, weights.zeros
    if scales is not None and scales.dtype is torch.float8_e8m0fnu and scales.view(torch.uint8).add(1).le(1).any():
        scales = scales.bfloat16()  # C reads neither 2^-127 nor NaN
    form = QuantisedLayout(
        codes=_CODES[weights.kind], scales=_NO_SCALES if scales is None else _SCALES[scales.dtype],
        has_zeros=zeros is not None, columns=num_columns, group=weights.group, **_tables(weights.kind),
    )  # fmt: skip
    if weights.kind == "int8" and library.pairs_columns(dtype) and not codes.eq(_LOWEST_INT8).any():
        codes = codes.view(torch.int8).abs().view(torch.uint8) | codes & _SIGN
        form.codes = _SIGNED
    row_block = weights.row_block
    lanes = library.vector_numbers()
    if scales is not None and row_block % lanes == 0 and (num_parts == 1 or out_size // 2 % lanes == 0):
        form.scales, scales = _VECTOR_SCALES, scales.float()
    order = _panel_order(library.panel_width(), out_size, num_parts)
    pointer = ctypes.pointer(form)
    panels = huge_pages.zeros((num_weights, len(order), library.quantised_panel_bytes(pointer)), torch.uint8)
    scales = None if scales is None else scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    for index in range(num_weights):
        library.pack_quantised(
            pointer, codes[index], None if scales is None else scales[index], row_block, None if zeros is None else
            zeros[index], panels[index], out_size, num_parts, dtype,
        )  # fmt: skip
    factors = weights.factors
    if factors is not None:
        factors = F.pad(factors, (0, 1))[:, order].contiguous()
    return PackedCodes(form=pointer, panels=panels, factors=factors)


def _tables(kind: Codes) -> dict[str, tuple[float, ...]]:
    """The tables of ``quantised.h`` that decode ``kind``."""
    if values_per_byte(kind) == 2:
        in_low_bits = code_values(kind, torch.arange(16, dtype=torch.uint8, device="cpu"))[::2]
        return {"values": tuple(in_low_bits.tolist())}
    without_sign = code_values(kind, torch.arange(128, dtype=torch.uint8, device="cpu"))
    low, high = without_sign.bfloat16().view(torch.uint8).view(-1, 2).unbind(1)
    return {"low": tuple(low.tolist()), "high": tuple(high.tolist())}


def _panel_order(width: int, out_size: int, num_parts: int) -> torch.Tensor:
    """The output of each place (panels, width); ``out_size`` where there is none."""
    part_size, part_width = out_size // num_parts, width // num_parts
    places = torch.arange(-(-part_size // part_width), dtype=torch.int64, device="cpu")[
        :, None, None
    ] * part_width + torch.arange(part_width, dtype=torch.int64, device="cpu")
    outputs = places + torch.arange(num_parts, dtype=torch.int64, device="cpu")[:, None] * part_size
    return torch.where(places < part_size, outputs, out_size).flatten(1)


def _in_short_groups(weights: QuantisedWeight, limit: int) -> QuantisedWeight:
    """The same weights with groups of at most ``limit`` columns; scales that are alike in a row become factors."""
    num_columns, scales, zeros, factors = weights.shape[-1], weights.scales, weights.zeros, weights.factors
    group = weights.group if scales is not None else num_columns
    if scales is not None and group >= num_columns:
        own = scales[..., 0].float().repeat_interleave(weights.row_block, -1).narrow(-1, 0, weights.shape[-2])
        scales, factors, group = None, own if factors is None else factors * own, num_columns
    if group > limit:
        shorter = limit if group == num_columns else _largest_divisor(group, limit)
        groups = torch.arange(0, num_columns, shorter, dtype=torch.int64, device="cpu") // group
        group = shorter
        scales, zeros = (None if one is None else one.index_select(-1, groups) for one in (scales, zeros))
    row_block = 1 if scales is None else weights.row_block
    return replace(weights, scales=scales, group=group, row_block=row_block, zeros=zeros, factors=factors)


def _largest_divisor(number: int, limit: int) -> int:
    """Of ``number``, at most ``limit``; a multiple of 8 if there is one."""
    divisors = [one for one in range(1, limit + 1) if number % one == 0]
    return max(divisors, key=lambda one: (one % 8 == 0, one))


def _in_whole_words(weights: QuantisedWeight) -> torch.Tensor:
    """The codes, contiguous, with zeros after each group's so that it ends with a word."""
    per_byte, (num_columns, group) = values_per_byte(weights.kind), (weights.shape[-1], weights.group)
    in_word = per_byte * _BYTES_PER_WORD
    if (group % in_word == 0 or group >= num_columns) and num_columns % in_word == 0:
        return weights.codes.contiguous()
    codes = weights.codes
    if per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    num_groups = -(-num_columns // group)
    last = num_columns - (num_groups - 1) * group
    codes = F.pad(codes, (0, group - last)).view(*codes.shape[:-1], num_groups, group)
    codes = F.pad(codes, (0, -group % in_word)).flatten(-2)
    codes = codes[..., : codes.shape[-1] - (group + -group % in_word) + last + -last % in_word]
    if per_byte == 2:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous()
