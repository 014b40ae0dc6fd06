"""The tensors of each layout: last part of the name -> tensor.

Words are int32, and their first value is in the lowest bits; ``out`` and ``in`` are the weight's rows and columns.
"""

from __future__ import annotations

import torch

from tests.quantised.numbers import Numbers

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # value p of a word belongs to column AWQ_ORDER[p] of its 8


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``values`` (..., n) from 0 to 2**bits - 1 -> int32 (..., ceil(n * bits / 32)); zeros fill up the last word."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[-1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.reshape(*padded.shape[:-1], -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def pack_bytes(nibbles: torch.Tensor) -> torch.Tensor:
    """4-bit codes (..., n) -> uint8 (..., n / 2), the even column in the low bits."""
    even, odd = nibbles[..., 0::2], nibbles[..., 1::2]
    return (even | odd << 4).to(torch.uint8)


def pack_quantized(numbers: Numbers) -> Tensors:
    """compressed-tensors ``pack-quantized``: words along ``in``, words of zero points along ``out``."""
    tensors = {
        "weight_packed": pack_words(numbers.codes, numbers.bits),
        "weight_scale": numbers.scales,
        "weight_shape": torch.tensor(numbers.codes.shape),
    }
    if numbers.order is not None:
        tensors["weight_g_idx"] = (numbers.order // numbers.block[1]).int()
    if numbers.zeros is not None:
        tensors["weight_zero_point"] = pack_words(numbers.zeros.T, numbers.bits).T.contiguous()
    return tensors


def pack_awq(numbers: Numbers) -> Tensors:
    """AutoAWQ's ``gemm`` layout: ``qweight`` (in, out / 8) and ``qzeros`` (groups, out / 8), columns interleaved."""

    def words(values: torch.Tensor) -> torch.Tensor:
        return pack_words(values.T.reshape(values.shape[1], -1, 8)[..., list(AWQ_ORDER)].flatten(-2), 4)

    return {
        "qweight": words(numbers.codes),
        "qzeros": words(numbers.all_zeros),
        "scales": numbers.scales.T.contiguous(),
    }


def pack_gptq(numbers: Numbers, *, version: int) -> Tensors:
    """AutoGPTQ's layout: ``qweight`` (in / per word, out), ``qzeros`` (groups, out / per word), ``g_idx`` (in,).

    Version 1 stores zero points less 1.  Columns are in the order that ``numbers`` have.
    """
    order = numbers.order
    zeros = numbers.all_zeros - (1 if version == 1 else 0)
    return {
        "qweight": pack_words(numbers.codes, numbers.bits).T.contiguous(),
        "qzeros": pack_words(zeros.T, numbers.bits),
        "scales": numbers.scales.T.contiguous(),
        "g_idx": ((torch.arange(numbers.codes.shape[1]) if order is None else order) // numbers.block[1]).int(),
    }


def pack_blocks_of_modelopt(numbers: Numbers) -> Tensors:
    """Scales (rows of blocks, 1, columns of blocks, 1)."""
    return {"weight": numbers.codes, "weight_scale": numbers.scales[:, None, :, None].clone()}


def pack_plain(
    numbers: Numbers, *, scale_name: str = "weight_scale", scale_shape: tuple[int, ...] | None = None
) -> Tensors:
    """Codes of 8 bits as they are, e4m3 or int8; ``scale_shape`` None: one per block.  Powers of two are bytes."""
    codes = numbers.codes if numbers.kind == "e4m3" else (numbers.codes - numbers.offset).to(torch.int8)
    scales = numbers.scales if scale_shape is None else numbers.scales.reshape(scale_shape)
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    return {"weight": codes, scale_name: scales}
