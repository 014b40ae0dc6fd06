"""A layer's experts applied to the tokens that were routed to them, in plain PyTorch: the twin of C and Triton.

::

    out_n = sum over j of weights[n, j] * down_e(activation(gate_e(x_n), up_e(x_n)))      e = expert_ids[n, j]

Products are rounded to the type of ``x``; the sum over j is float32, in the order of j, and rounded once.  Pairs whose
expert is on another rank add nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.quantization.weights import QuantisedWeight, multiply_quantised
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedExpertWeights:
    """``ExpertWeights`` with quantised weights: stacks of the same shapes.  Biases have the type of ``x``."""

    gate_up: QuantisedWeight
    down: QuantisedWeight
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    first: int
    activation: Activation


def mix_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    *,
    keeps_sums: bool = False,
) -> torch.Tensor:
    """``x`` (N, hidden), ``expert_ids`` (N, k) int32, ``weights`` (N, k) float32 -> (N, hidden), of ``x``'s type.

    If it ``keeps_sums``, the result is float32, and the products that it adds up are not rounded.
    """
    down, down_bias = experts.down, experts.down_bias
    if keeps_sums:
        down, down_bias = down.float(), None if down_bias is None else down_bias.float()

    def apply(rows: torch.Tensor, index: int) -> torch.Tensor:
        inner = gate(F.linear(rows, experts.gate_up[index], _of(experts.gate_up_bias, index)), experts.activation)
        return F.linear(inner.to(down.dtype), down[index], _of(down_bias, index))

    return _mix(x, expert_ids - experts.first, weights, len(experts.gate_up), apply, down.dtype)


def mix_quantised_experts(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, experts: QuantisedExpertWeights
) -> torch.Tensor:
    """``mix_experts`` with the products of ``multiply_quantised``."""
    gate_up, down = experts.gate_up, experts.down

    def apply(rows: torch.Tensor, index: int) -> torch.Tensor:
        gate_up_bias, down_bias = _of(experts.gate_up_bias, index), _of(experts.down_bias, index)
        inner = multiply_quantised(rows, gate_up.expert(index), gate_up_bias, experts.activation)
        return multiply_quantised(inner, down.expert(index), down_bias)

    return _mix(x, expert_ids - experts.first, weights, gate_up.shape[0], apply, x.dtype)


def _mix(
    x: torch.Tensor,
    local_ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    apply: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The result, and the experts' outputs, have the type ``dtype``."""
    outputs = x.new_zeros((*local_ids.shape, x.shape[1]), dtype=dtype)
    for index in range(num_experts):
        tokens, places = (local_ids == index).nonzero(as_tuple=True)
        if len(tokens):
            outputs[tokens, places] = apply(x[tokens], index)
    return add_up(outputs, weights).to(dtype)


def add_up(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``outputs`` (N, k, width) times ``weights`` (N, k), added up in the order of k: (N, width) float32."""
    total = torch.zeros_like(outputs[:, 0], dtype=torch.float32)
    for place in range(outputs.shape[1]):
        total += outputs[:, place].float() * weights[:, place, None]
    return total


def add_gated(total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    """``total`` (N, width) += sigmoid(``gates`` (N, 1)) * ``x`` (N, width), in float32, rounded once."""
    total.copy_(total.float() + x.float() * gates.float().sigmoid())


def _of(biases: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if biases is None else biases[index]
