"""The tensors of quantised modules on disk, packing by packing, and how they become codes, scales and zero points.

::

    packing              codes                                scales                         zero points
    plain                weight (N, K) fp8 or int8            weight_scale[_inv], one per block, row or module
    mxfp8                weight (N, K) fp8                    weight_scale[_inv] uint8 (N, K/32)
    pack-quantized       weight_packed int32 (N, K/8)         weight_scale (N, K/g)          (N/8, K/g)
    awq                  qweight int32 (K, N/8), interleaved  scales (K/g, N)                qzeros (K/g, N/8)
    gptq, gptq_v2        qweight int32 (K/8, N)               scales (K/g, N)                qzeros (K/g, N/8)
    mxfp4                X_blocks uint8 (E, N, K/32, 16)      X_scales uint8 (E, N, K/32)
    mxfp4-packed         weight_packed uint8 (N, K/2)         weight_scale uint8 (N, K/32)
    mxfp4-weight         weight uint8 (N, K/2)                weight_scale uint8 (N, K/32)
    mxfp4-int8           weight int8 (N, K/2)                 scale float8_e8m0fnu (N, K/32)
    nvfp4                weight_packed uint8 (N, K/2)         weight_scale fp8 (N, K/16), 1 / weight_global_scale
    modelopt-nvfp4       weight uint8 (N, K/2)                weight_scale fp8 (N, K/16), weight_scale_2

NVFP4's inputs have a scale for all of them: 1 / input_global_scale, or modelopt's input_scale.

``/8`` is for 4 bits, ``/4`` for 8.  Words hold their first value in the lowest bits; AWQ's order is ``AWQ_ORDER``.
GPTQ's first version stores zero points minus one; the zero points of symmetric codes are the middle, and not read.
A packing is a line of ``PACKINGS``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from tp_engine.kernels.quantization.weights import E2M1_VALUES, INT4_OFFSET, INT4_ZERO_PARTS, Codes
from tp_engine.layers.quantization.stored import StoredTensor, Unit
from tp_engine.model_config.quantization import WeightScheme
from tp_engine.weights.source import Decode, as_stored

# Nibble p of an AWQ word holds column AWQ_ORDER[p] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_DUMMY_SCALES = {"int4": 0.004, "int8": 0.0003, "e4m3": 0.03, "e2m1": 0.008}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A tensor with one number for a whole module.  ``divides``: rows are divided by it, so it must be above 0."""

    suffix: str
    decode: Decode = as_stored
    divides: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """A module's tensors on disk.  Each row has a factor (``factors``), or the module has one (``factor``).  Inputs
    that are rounded in blocks may have one, too (``input_factor``).

    ``others`` are other shapes in which its scales, or its factors, may be stored.
    """

    codes: StoredTensor
    scales: StoredTensor | None = None
    zeros: StoredTensor | None = None
    factors: StoredTensor | None = None
    factor: Scalar | None = None
    input_factor: Scalar | None = None
    others: tuple[StoredTensor, ...] = ()
    scale_type: torch.dtype | None = None
    """The type of 8-bit scales, which are read as bytes."""


def tensors_of(scheme: WeightScheme, num_columns: int) -> Tensors:
    """The tensors of a module with ``num_columns`` input columns."""
    return PACKINGS[scheme.packing](scheme, scheme.group or num_columns)


def pack_codes(kind: Codes, columns: int) -> tuple[Codes, int, Decode]:
    """How ``columns`` codes of ``kind`` are kept: the kind, the codes per byte, and the packing.

    An odd number of codes of 4 bits is kept in 8 bits, which hold the same values.
    """
    if kind in ("int8", "e4m3"):
        return kind, 1, as_stored
    if columns % 2 == 0:
        return kind, 2, lambda codes: codes[:, 0::2] | codes[:, 1::2] << 4  # the inverse of _split_nibbles
    return ("int8", 1, _int4_as_int8) if kind == "int4" else ("e4m3", 1, _e2m1_as_e4m3)


def unpack_codes(kind: Codes, packed: torch.Tensor) -> torch.Tensor:
    """The codes, a byte each, that ``pack_codes`` has packed in ``kind``."""
    return _split_nibbles(packed) if kind in ("int4", "e2m1") else packed


def pack_zeros(kind: Codes) -> Decode:
    """How zero points in steps become those of a weight that is kept in ``kind``."""
    return (lambda zeros: zeros * INT4_ZERO_PARTS) if kind == "int4" else as_stored


def _plain(scheme: WeightScheme, group: int) -> Tensors:
    dtype = torch.float8_e4m3fn if scheme.kind == "e4m3" else torch.int8
    codes = StoredTensor(suffix=".weight", dtype=dtype, unpack=_as_bytes)
    name = "." + scheme.scale_name
    if scheme.row_block is None:
        return Tensors(codes=codes, factor=Scalar(suffix=name))
    block = Unit(scheme.row_block, group)
    scales = StoredTensor(suffix=name, unit=block, unpacked=block, init=_DUMMY_SCALES[scheme.kind])
    if scheme.group is None:
        return Tensors(codes=codes, factors=scales, others=(replace(scales, form="vector"),))
    return Tensors(codes=codes, scales=scales, others=(replace(scales, form="singles"),))


def _mxfp8(scheme: WeightScheme, group: int) -> Tensors:
    codes = StoredTensor(suffix=".weight", dtype=torch.float8_e4m3fn, unpack=_as_bytes)
    return Tensors(codes=codes, scales=_powers(f".{scheme.scale_name}"), scale_type=torch.float8_e8m0fnu)


def _mxfp4_packed(scheme: WeightScheme, group: int, *, codes: str) -> Tensors:
    return Tensors(codes=_bytes(codes), scales=_powers(".weight_scale"), scale_type=torch.float8_e8m0fnu)


def _mxfp4_int8(scheme: WeightScheme, group: int) -> Tensors:
    codes = replace(_bytes(".weight"), unpack=lambda values: _split_nibbles(_as_bytes(values)), dtype=torch.int8)
    scales = replace(_powers(f".{scheme.scale_name}"), unpack=_as_bytes, dtype=torch.float8_e8m0fnu, init=1.0)
    return Tensors(codes=codes, scales=scales, scale_type=torch.float8_e8m0fnu)


def _pack_quantized(scheme: WeightScheme, group: int) -> Tensors:
    bits = 4 if scheme.kind == "int4" else 8
    zeros = StoredTensor(
        suffix=".weight_zero_point",
        unit=Unit(32 // bits, group),
        unpacked=Unit(1, group),
        unpack=partial(_unpack_zeros, bits=bits),
        dtype=torch.int32,
    )
    return Tensors(
        codes=_words(".weight_packed", bits),
        scales=_scales(scheme, ".weight_scale", group),
        zeros=zeros if scheme.has_zeros else None,
    )


def _awq(scheme: WeightScheme, group: int) -> Tensors:
    codes = StoredTensor(
        suffix=".qweight",
        unit=Unit(8, 1),
        unpack=partial(_unpack_rows, bits=4, order=AWQ_ORDER),
        is_transposed=True,
        dtype=torch.int32,
    )
    scales = _scales(scheme, ".scales", group, is_transposed=True)
    zeros = _transposed_zeros(group, partial(_unpack_zeros, bits=4, order=AWQ_ORDER), bits=4)
    return Tensors(codes=codes, scales=scales, zeros=zeros)


def _gptq(scheme: WeightScheme, group: int, *, less_one: bool) -> Tensors:
    bits = 4 if scheme.kind == "int4" else 8
    unpack = partial(_unpack_zeros, bits=bits, added=int(less_one))
    return Tensors(
        codes=_words(".qweight", bits, is_transposed=True),
        scales=_scales(scheme, ".scales", group, is_transposed=True),
        zeros=_transposed_zeros(group, unpack, bits=bits) if scheme.has_zeros else None,
    )


def _mxfp4(scheme: WeightScheme, group: int) -> Tensors:
    codes = StoredTensor(
        suffix="_blocks",
        unit=Unit(1, 32),
        tail=(16,),
        unpack=lambda values: _split_nibbles(values.flatten(1)),
        dtype=torch.uint8,
    )
    return Tensors(codes=codes, scales=_powers("_scales"), scale_type=torch.float8_e8m0fnu)


def _nvfp4(scheme: WeightScheme, group: int, *, codes: str, factor: Scalar, input_factor: Scalar) -> Tensors:
    block = Unit(1, group)
    scales = StoredTensor(
        suffix=".weight_scale", unit=block, unpacked=block, unpack=_as_bytes, dtype=torch.float8_e4m3fn, init=1.0
    )
    return Tensors(
        codes=_bytes(codes), scales=scales, factor=factor, scale_type=torch.float8_e4m3fn, input_factor=input_factor
    )


PACKINGS: dict[str, Callable[[WeightScheme, int], Tensors]] = {
    "plain": _plain,
    "pack-quantized": _pack_quantized,
    "awq": _awq,
    "gptq": partial(_gptq, less_one=True),
    "gptq_v2": partial(_gptq, less_one=False),
    "mxfp4": _mxfp4,
    "mxfp4-packed": partial(_mxfp4_packed, codes=".weight_packed"),
    "mxfp4-weight": partial(_mxfp4_packed, codes=".weight"),
    "mxfp4-int8": _mxfp4_int8,
    "mxfp8": _mxfp8,
    "nvfp4": partial(
        _nvfp4,
        codes=".weight_packed",
        factor=Scalar(suffix=".weight_global_scale", decode=torch.reciprocal),
        input_factor=Scalar(suffix=".input_global_scale", decode=torch.reciprocal, divides=True),
    ),
    "modelopt-nvfp4": partial(
        _nvfp4,
        codes=".weight",
        factor=Scalar(suffix=".weight_scale_2"),
        input_factor=Scalar(suffix=".input_scale", divides=True),
    ),
}


def _scales(scheme: WeightScheme, suffix: str, group: int, *, is_transposed: bool = False) -> StoredTensor:
    """Floating point scales of each row's groups."""
    block, init = Unit(1, group), _DUMMY_SCALES[scheme.kind]
    return StoredTensor(suffix=suffix, unit=block, unpacked=block, is_transposed=is_transposed, init=init)


def _powers(suffix: str) -> StoredTensor:
    """Powers of two as exponents of 8 bits, for blocks of 32."""
    block = Unit(1, 32)
    return StoredTensor(suffix=suffix, unit=block, unpacked=block, dtype=torch.uint8, init=120)


def _words(suffix: str, bits: int, *, is_transposed: bool = False) -> StoredTensor:
    """Codes in words of 32 bits along the columns."""
    unpack = partial(_unpack_columns, bits=bits)
    return StoredTensor(
        suffix=suffix, unit=Unit(1, 32 // bits), unpack=unpack, is_transposed=is_transposed, dtype=torch.int32
    )


def _bytes(suffix: str) -> StoredTensor:
    """Codes of 4 bits in bytes along the columns."""
    return StoredTensor(suffix=suffix, unit=Unit(1, 2), unpack=_split_nibbles, dtype=torch.uint8)


def _transposed_zeros(group: int, unpack: Decode, bits: int) -> StoredTensor:
    """Zero points (K / group, N / values per word)."""
    unit = Unit(32 // bits, group)
    return StoredTensor(
        suffix=".qzeros", unit=unit, unpacked=Unit(1, group), unpack=unpack, is_transposed=True, dtype=torch.int32
    )


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    # A single column of a transposed tensor counts as contiguous, although its last stride is not 1.
    values = values.contiguous() if values.shape[-1] > 1 else values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


def _split_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Bytes (rows, n) -> codes (rows, 2 n), the low bits first."""
    return torch.stack((values & 15, values >> 4), -1).flatten(1)


def _unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words (rows, n) -> codes (rows, n * 32 / bits); codes of 8 bits become signed."""
    found = _as_bytes(words)
    return _split_nibbles(found) if bits == 4 else found ^ 128


def _unpack_rows(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words (n, columns) -> codes (n * 32 / bits, columns); ``order``: which row each part of a word holds."""
    found = _as_bytes(words.transpose(0, 1))
    found = _split_nibbles(found) if bits == 4 else found
    if order is not None:
        places = torch.tensor(order, dtype=torch.int64, device="cpu").argsort()
        found = found.view(len(found), -1, len(order))[:, :, places].flatten(1)
    return found.transpose(0, 1)


def _unpack_zeros(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None, added: int = 0) -> torch.Tensor:
    """Words (n, groups) -> zero points (n * 32 / bits, groups) int8, relative to the signed codes."""
    codes = (_unpack_rows(words, bits, order).to(torch.int16) + added) & ((1 << bits) - 1)
    return (codes - (1 << bits - 1)).to(torch.int8)


def _int4_as_int8(codes: torch.Tensor) -> torch.Tensor:
    return (codes.to(torch.int8) - INT4_OFFSET).view(torch.uint8)


def _e2m1_as_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return (
        torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu")
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)[codes.int()]
    )
