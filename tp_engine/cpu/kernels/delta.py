"""The gated delta rule in C (``delta.c``), for decodes and for prompts, and the gate of attention's output."""

import ctypes
from collections.abc import Callable

import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.recurrent import chunk_table
from tp_engine.kernels import gated_delta_net as delta_twins
from tp_engine.kernels import layer_ops as twins
from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.kernels.recurrent import Chunk, LayerStates

MAX_DIM = 256  # of delta.c


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
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (slots, runs) if one is not None)
    rows = slots.data_ptr(), None if runs is None else runs.data_ptr()
    return _run(library.gated_delta_net_decode, mixed, gates, rule, states, rows, len(mixed))


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
    is_small = max(rule.kind.key_dim, rule.kind.value_dim) <= MAX_DIM
    has_rows = gates.dtype is mixed.dtype and mixed.stride(1) == gates.stride(1) == 1
    return mixed.dtype in DTYPE_CODES and has_rows and is_small


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
        *((None, None) if states is None else (part.data_ptr() for part in states)),
        *((0, 0) if states is None else (part.stride(0) for part in states)), kind.num_key_heads, kind.num_value_heads,
        kind.key_dim, kind.value_dim, kind.taps, mixed.data_ptr(), mixed.stride(0), gates.data_ptr(), gates.stride(0),
        *rows, out.data_ptr(), num_rows, DTYPE_CODES[mixed.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("the delta rule has no memory for states that are not kept")
    return out


def sigmoid_gate(library: ctypes.CDLL, x: torch.Tensor, gate: torch.Tensor) -> None:
    """Compute ``layer_ops.sigmoid_gate`` in C."""
    dtype = DTYPE_CODES.get(x.dtype)
    if dtype is None or gate.dtype is not x.dtype or not x.is_contiguous() or gate.stride(1) != 1:
        twins.sigmoid_gate(x, gate)
        return
    library.sigmoid_gate(x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, dtype, torch.get_num_threads())
