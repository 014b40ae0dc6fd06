"""The gated delta rule's step of decodes in C (``delta.c``), and the gate of attention's output."""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels import delta_rule as delta_twins
from tp_engine.kernels import layer_ops as twins
from tp_engine.kernels.delta_rule import DeltaRule, LayerStates
from tp_engine.kernels.native.layout import DTYPE_CODES

MAX_DIM = 256  # of delta.c


def delta_step(
    library: ctypes.CDLL,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: LayerStates,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See ``delta_rule.delta_step``."""
    kind, dtype = rule.kind, DTYPE_CODES.get(mixed.dtype)
    is_small = max(kind.key_dim, kind.value_dim) <= MAX_DIM
    if dtype is None or gates.dtype is not mixed.dtype or not (is_small and mixed.stride(1) == gates.stride(1) == 1):
        return delta_twins.delta_step(mixed, gates, rule, states, slots)
    assert slots.dtype == torch.int32 and slots.is_contiguous()
    out = torch.empty((len(mixed), kind.num_value_heads * kind.value_dim), dtype=mixed.dtype)
    library.delta_step(
        *(one.data_ptr() for one in (rule.conv, rule.decay, rule.dt_bias, rule.norm)),
        float(rule.eps),
        states.conv.data_ptr(),
        states.recurrent.data_ptr(),
        states.conv.stride(0),
        states.recurrent.stride(0),
        kind.num_key_heads,
        kind.num_value_heads,
        kind.key_dim,
        kind.value_dim,
        kind.taps,
        mixed.data_ptr(),
        mixed.stride(0),
        gates.data_ptr(),
        gates.stride(0),
        slots.data_ptr(),
        out.data_ptr(),
        len(mixed),
        dtype,
        torch.get_num_threads(),
    )
    return out


def sigmoid_gate(library: ctypes.CDLL, x: torch.Tensor, gate: torch.Tensor) -> None:
    """See ``layer_ops.sigmoid_gate``."""
    dtype = DTYPE_CODES.get(x.dtype)
    if dtype is None or gate.dtype is not x.dtype or not x.is_contiguous() or gate.stride(1) != 1:
        twins.sigmoid_gate(x, gate)
        return
    library.sigmoid_gate(x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, dtype, torch.get_num_threads())
