"""A layer's experts applied to the tokens that were routed to them, in plain PyTorch: the twin of C and Triton.

::

    out_n = sum over j of weights[n, j] * down_e(activation(gate_e(x_n), up_e(x_n)))      e = expert_ids[n, j]

Products are rounded to the type of ``x``; the sum over j is float32, in the order of j, and rounded once.  Pairs whose
expert is on another rank add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import gate
from tp_engine.model_config.mlp import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The experts from ``first`` on: ``gate_up`` (E, 2 * inner, hidden), ``down`` (E, hidden, inner), and biases, if
    any, (E, 2 * inner) and (E, hidden)."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    first: int
    activation: Activation


def mix_experts(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """``x`` (N, hidden), ``expert_ids`` (N, k) int32, ``weights`` (N, k) float32 -> (N, hidden), of ``x``'s type."""
    outputs = x.new_zeros((*expert_ids.shape, x.shape[1]))
    local = expert_ids - experts.first
    for index in range(len(experts.gate_up)):
        tokens, places = (local == index).nonzero(as_tuple=True)
        if len(tokens):
            outputs[tokens, places] = _apply(x[tokens], index, experts)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in range(expert_ids.shape[1]):
        total += outputs[:, place].float() * weights[:, place, None]
    return total.to(x.dtype)


def add_gated(total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    """``total`` (N, width) += sigmoid(``gates`` (N, 1)) * ``x`` (N, width), in float32, rounded once."""
    total.copy_(total.float() + x.float() * gates.float().sigmoid())


def _apply(x: torch.Tensor, index: int, experts: ExpertWeights) -> torch.Tensor:
    def bias(of_all: torch.Tensor | None) -> torch.Tensor | None:
        return None if of_all is None else of_all[index]

    inner = gate(F.linear(x, experts.gate_up[index], bias(experts.gate_up_bias)), experts.activation)
    return F.linear(inner, experts.down[index], bias(experts.down_bias))
