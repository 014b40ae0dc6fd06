"""Mamba2's state space layer in C (``mamba2.c``), for decodes and for prompts, and the norm of groups behind it."""

import ctypes
from collections.abc import Callable

import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.recurrent import check_memory, chunk_table, is_taken, matrix_arguments, row_addresses
from tp_engine.kernels import mamba2 as twins
from tp_engine.kernels.mamba2 import Mamba2Rule
from tp_engine.kernels.recurrent import Chunk, LayerStates


def mamba2_decode(
    library: ctypes.CDLL,
    mixed: torch.Tensor,
    rule: Mamba2Rule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``mamba2.mamba2_decode`` in C."""
    if not is_taken(mixed, rule.kind):
        return twins.mamba2_decode(mixed, rule, states, slots, runs)
    return _run(library.mamba2_decode, mixed, rule, states, row_addresses(slots, runs), len(mixed))


def mamba2_prefill(
    library: ctypes.CDLL, mixed: torch.Tensor, rule: Mamba2Rule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """Compute ``mamba2.mamba2_prefill`` in C; token by token, so the results are bit by bit those of
    ``mamba2_decode``."""
    if not is_taken(mixed, rule.kind):
        return twins.mamba2_prefill(mixed, rule, states, chunks)
    table = chunk_table(chunks, has_states=states is not None)
    return _run(library.mamba2_prefill, mixed, rule, states, (table.ctypes.data,), len(chunks))


def group_squares(library: ctypes.CDLL, x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Compute ``mamba2.group_squares`` in C."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        return twins.group_squares(x, num_groups)
    rows, width = x.shape
    out = torch.empty((rows, num_groups))
    threads = torch.get_num_threads()
    library.group_squares(x.data_ptr(), out.data_ptr(), rows, num_groups, width // num_groups, threads)
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
        return twins.norm_groups(x, weight, num_groups, eps, squares, group_size)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=weight.dtype)
    library.norm_groups(
        x.data_ptr(), weight.data_ptr(), None if squares is None else squares.data_ptr(), out.data_ptr(), rows,
        num_groups, width // num_groups, group_size, float(eps), DTYPE_CODES[weight.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def _run(
    function: Callable[..., int],
    mixed: torch.Tensor,
    rule: Mamba2Rule,
    states: LayerStates | None,
    rows: tuple[int | None, ...],
    num_rows: int,
) -> torch.Tensor:
    """``function`` of the library; ``rows`` are the addresses of what says where its ``num_rows`` rows or chunks
    are."""
    kind = rule.kind
    out = torch.empty((len(mixed), kind.num_value_heads * kind.value_dim))
    failed = function(
        *(one.data_ptr() for one in (rule.conv, rule.conv_bias, rule.decay, rule.dt_bias, rule.skip)),
        *matrix_arguments(states, kind), mixed.data_ptr(), mixed.stride(0), *rows, out.data_ptr(), num_rows,
        DTYPE_CODES[mixed.dtype], torch.get_num_threads(),
    )  # fmt: skip
    check_memory(failed)
    return out
