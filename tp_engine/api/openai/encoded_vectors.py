"""Vectors as bytes, in the types that vLLM's ``embed_dtype`` names and those of Cohere's ``embedding_types``.

numpy has no bfloat16 and no eight-bit floats.  Both are rounded as in PyTorch: to the nearest value, of two equally
near ones to the one with an even code; beyond the largest value to infinity, or to that value where there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

from tp_engine.errors import RequestError
from tp_engine.plan import FloatArray

EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness: TypeAlias = Literal["native", "big", "little"]

_NOT_A_NUMBER = 0x7F


def encoded_vector(values: FloatArray, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """The numbers of ``values`` as bytes."""
    codes = _CODES[dtype](np.ascontiguousarray(values, dtype=np.float32))
    order = sys.byteorder if endianness == "native" else endianness
    encoded: bytes = codes.astype(codes.dtype.newbyteorder("<" if order == "little" else ">")).tobytes()
    return encoded


def packed_signs(values: FloatArray, *, signed: bool) -> list[int]:
    """One bit per number, 1 unless it is negative, eight to a byte with the first one highest; ``signed``: minus 128,
    like Cohere's ``binary``.  Raises ``RequestError``."""
    if len(values) % 8:
        raise RequestError(
            f"the vectors have {len(values)} numbers, which do not fill whole bytes; leave binary and ubinary out of "
            "embedding_types, or set output_dimension to a multiple of 8",
            param="embedding_types",
        )
    packed = np.packbits(values >= 0).astype(np.int16)
    found: list[int] = (packed - 128 if signed else packed).tolist()
    return found


def _float16(values: FloatArray) -> Any:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _bfloat16(values: FloatArray) -> Any:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _eight_bits(values: FloatArray, num_exponent_bits: int) -> Any:
    """The codes of the nearest values of an eight-bit format."""
    middles = _middles(num_exponent_bits)
    below = np.searchsorted(middles, np.abs(values), side="left")
    above = np.searchsorted(middles, np.abs(values), side="right")
    codes = np.where(below % 2 == 0, below, above)
    codes = np.where(np.isnan(values), _NOT_A_NUMBER, codes)
    return (codes | np.signbit(values) * 0x80).astype(np.uint8)


@cache
def _middles(num_exponent_bits: int) -> FloatArray:
    """The values halfway between those of neighbouring codes, up to the infinity of e5m2; e4m3 has none."""
    num_fraction_bits = 7 - num_exponent_bits
    codes = np.arange(0x7C + 1 if num_exponent_bits == 5 else 0x7E + 1)
    exponents, fractions = codes >> num_fraction_bits, codes & ((1 << num_fraction_bits) - 1)
    bias = (1 << (num_exponent_bits - 1)) - 1
    significands = fractions / (1 << num_fraction_bits) + (exponents > 0)
    values = np.ldexp(significands, np.maximum(exponents, 1) - bias)
    middles: FloatArray = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    return middles


_CODES: Mapping[EmbedDtype, Callable[[FloatArray], Any]] = {
    "float32": lambda values: values,
    "float16": _float16,
    "bfloat16": _bfloat16,
    "fp8_e4m3": lambda values: _eight_bits(values, 4),
    "fp8_e5m2": lambda values: _eight_bits(values, 5),
}
