"""Layers with a recurrent state in C (``delta.c``, ``mamba2.c``, ``short_conv.c``), for decodes and for prompts, and
the norm of groups after Mamba2's.  Prompts go token by token: their results are bit by bit those of decodes."""

import ctypes
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.kernels import gated_delta_net, kda, mamba2, short_conv

MAX_DIM = 256  # of matrix_states.h


def _in_c(
    function: str, twin: Callable[..., torch.Tensor], dtype: torch.dtype | None = None
) -> Callable[..., torch.Tensor]:
    """``twin`` by ``function`` of the library, the first argument; the result has ``dtype``, None: that of the inputs.

    A twin's arguments are the inputs (N, ...), the rule, whose fields but the first are those of C in their order, the
    states, and slots and runs of decodes, or chunks of prompts.
    """

    def run(library: ctypes.CDLL, *given: Any) -> torch.Tensor:
        count = next(index for index, one in enumerate(given) if not isinstance(one, torch.Tensor))
        inputs, (rule, states, *places) = given[:count], given[count:]
        mixed, kind = inputs[0], rule.kind
        is_taken = mixed.dtype in DTYPE_CODES and max(kind.key_dim, kind.value_dim) <= MAX_DIM
        if not is_taken or not all(one.dtype is mixed.dtype and one.stride(1) == 1 for one in inputs):
            return twin(*given)
        rows: tuple[torch.Tensor | int | None, ...]
        if isinstance(places[0], list):
            slots_of = (-1 if one.slot is None or states is None else one.slot for one in places[0])
            table = [(*one[:2], slot, one.is_fresh) for one, slot in zip(places[0], slots_of, strict=True)]
            chunks = np.array(table, np.int64)
            num_runs, rows = len(chunks), (None, None, chunks.ctypes.data)
        else:
            slots, runs = (*places, None)[:2]
            assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (slots, runs) if one is not None)
            num_runs, rows = len(mixed), (slots, runs, None)
        constants, has_matrices = [getattr(rule, field.name) for field in fields(rule)[1:]], kind.key_dim > 0
        kept = ((None, None) if states is None else states)[: 1 + has_matrices]
        heads = (kind.num_key_heads, kind.num_value_heads, kind.key_dim, kind.value_dim)
        out = torch.empty((len(mixed), kind.num_value_heads * kind.value_dim), dtype=dtype or mixed.dtype, device="cpu")
        failed = getattr(library, function)(
            *constants, *kept, *(0 if one is None else one.stride(0) for one in kept),
            *(heads if has_matrices else (kind.num_channels,)), kind.taps,
            *(part for one in inputs for part in (one, one.stride(0))), *rows, out, num_runs, mixed.dtype,
        )  # fmt: skip
        if failed:
            raise MemoryError("there is no memory for recurrent states that are not kept")
        return out

    return run


gated_delta_net_decode = _in_c("gated_delta_net", gated_delta_net.gated_delta_net_decode)
gated_delta_net_prefill = _in_c("gated_delta_net", gated_delta_net.gated_delta_net_prefill)
kda_decode = _in_c("kimi_delta", kda.kda_decode)
kda_prefill = _in_c("kimi_delta", kda.kda_prefill)
mamba2_decode = _in_c("mamba2", mamba2.mamba2_decode, torch.float32)
mamba2_prefill = _in_c("mamba2", mamba2.mamba2_prefill, torch.float32)
short_conv_decode = _in_c("short_conv", short_conv.short_conv_decode)
short_conv_prefill = _in_c("short_conv", short_conv.short_conv_prefill)


def group_squares(library: ctypes.CDLL, x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Compute ``mamba2.group_squares`` in C."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        return mamba2.group_squares(x, num_groups)
    rows, width = x.shape
    out = torch.empty((rows, num_groups), dtype=torch.float32, device="cpu")
    library.group_squares(x, out, rows, num_groups, width // num_groups)
    return out


def norm_groups(
    library: ctypes.CDLL,
    x: torch.Tensor,
    weight: torch.Tensor,
    num_groups: int,
    eps: float,
    squares: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """Compute ``mamba2.norm_groups`` in C."""
    is_dense = x.is_contiguous() and (squares is None or squares.is_contiguous())
    if x.dtype != torch.float32 or weight.dtype not in DTYPE_CODES or not is_dense:
        return mamba2.norm_groups(x, weight, num_groups, eps, squares, group_size)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=weight.dtype, device="cpu")
    library.norm_groups(x, weight, squares, out, rows, num_groups, width // num_groups, group_size, eps, weight.dtype)
    return out
