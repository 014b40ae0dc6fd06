"""The gated delta rule in C (``delta.c``), for decodes and for prompts, and the gate of attention's output."""

import ctypes
from collections.abc import Callable

import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.recurrent import check_memory, chunk_table, is_taken, matrix_arguments, row_addresses
from tp_engine.kernels import gated_delta_net as delta_twins
from tp_engine.kernels import layer_ops as twins
from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.kernels.recurrent import Chunk, LayerStates


def gated_delta_net_decode(
    library: ctypes.CDLL,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``gated_delta_net.gated_delta_net_decode`` in C."""
    if not _takes(mixed, gates, rule):
        return delta_twins.gated_delta_net_decode(mixed, gates, rule, states, slots, runs)
    return _run(library.gated_delta_net_decode, mixed, gates, rule, states, row_addresses(slots, runs), len(mixed))


def gated_delta_net_prefill(
    library: ctypes.CDLL,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: LayerStates | None,
    chunks: list[Chunk],
) -> torch.Tensor:
    """Compute ``gated_delta_net.gated_delta_net_prefill`` in C; token by token, so the results are bit by bit those of
    ``gated_delta_net_decode``."""
    if not _takes(mixed, gates, rule):
        return delta_twins.gated_delta_net_prefill(mixed, gates, rule, states, chunks)
    table = chunk_table(chunks, has_states=states is not None)
    return _run(library.gated_delta_net_prefill, mixed, gates, rule, states, (table.ctypes.data,), len(chunks))


def _takes(mixed: torch.Tensor, gates: torch.Tensor, rule: DeltaRule) -> bool:
    return is_taken(mixed, rule.kind) and gates.dtype is mixed.dtype and gates.stride(1) == 1


def _run(
    function: Callable[..., int],
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: LayerStates | None,
    rows: tuple[int | None, ...],
    num_rows: int,
) -> torch.Tensor:
    """``function`` of the library; ``rows`` are the addresses of what says where its ``num_rows`` rows or runs are."""
    kind = rule.kind
    out = torch.empty((len(mixed), kind.num_value_heads * kind.value_dim), dtype=mixed.dtype)
    failed = function(
        *(one.data_ptr() for one in (rule.conv, rule.decay, rule.dt_bias, rule.norm)), float(rule.eps),
        *matrix_arguments(states, kind), mixed.data_ptr(), mixed.stride(0), gates.data_ptr(), gates.stride(0), *rows,
        out.data_ptr(), num_rows, DTYPE_CODES[mixed.dtype], torch.get_num_threads(),
    )  # fmt: skip
    check_memory(failed)
    return out


def sigmoid_gate(library: ctypes.CDLL, x: torch.Tensor, gate: torch.Tensor) -> None:
    """Compute ``layer_ops.sigmoid_gate`` in C."""
    dtype = DTYPE_CODES.get(x.dtype)
    if dtype is None or gate.dtype is not x.dtype or not x.is_contiguous() or gate.stride(1) != 1:
        twins.sigmoid_gate(x, gate)
        return
    library.sigmoid_gate(x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, dtype, torch.get_num_threads())
