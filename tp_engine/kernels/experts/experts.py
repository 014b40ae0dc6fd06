"""A layer's experts applied to the tokens routed to them, in plain PyTorch: the twin of C and Triton.

::

    out_n = sum over j of weights[n, j] * down_e(activation(gate_e(x_n), up_e(x_n)))      e = expert_ids[n, j]

Products are rounded to the type of ``x``; the sum over j is float32, in the order of j, and rounded once.  Pairs whose
expert is on another rank add nothing.  Weights that say so (``QuantisedWeight.rows``) round their rows in blocks first:
x, and what down reads, by each expert's own scale.
"""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.quantization.block_rows import round_rows
from tp_engine.kernels.quantization.weights import QuantisedWeight, multiply_quantised
from tp_engine.model_config.mlp import Activation

Weights: TypeAlias = torch.Tensor | QuantisedWeight
"""A weight of each expert (E, out, in)."""
Kind = TypeVar("Kind", bound=Weights, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights(Generic[Kind]):
    """The experts from ``first`` on: ``gate_up`` (E, 2 * inner, hidden), ``down`` (E, hidden, inner), both of the type
    of ``x`` or both quantised, and biases, if any, (E, 2 * inner) and (E, hidden), of the type of ``x``."""

    gate_up: Kind
    down: Kind
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    first: int
    activation: Activation


def mix_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights[Weights],
    *,
    keeps_sums: bool = False,
) -> torch.Tensor:
    """``x`` (N, hidden), ``expert_ids`` (N, k) int32, ``weights`` (N, k) float32 -> (N, hidden), in ``x``'s type.

    If it ``keeps_sums``, the result is float32, and the products that it adds up are not rounded.
    """
    dtype, local_ids = torch.float32 if keeps_sums else x.dtype, expert_ids - experts.first
    outputs = x.new_zeros((*local_ids.shape, x.shape[1]), dtype=dtype)
    for index in range(experts.gate_up.shape[0]):
        tokens, places = (local_ids == index).nonzero(as_tuple=True)
        if len(tokens):
            both = _multiply(x[tokens], experts.gate_up, experts.gate_up_bias, index)
            inner = gate(both, experts.activation).to(dtype)
            outputs[tokens, places] = _multiply(inner, experts.down, experts.down_bias, index)
    return add_up(outputs, weights).to(dtype)


def _multiply(rows: torch.Tensor, weights: Weights, biases: torch.Tensor | None, index: int) -> torch.Tensor:
    """``rows`` (n, in) times the weight of expert ``index`` -> (n, out), in the rows' type."""
    bias = None if biases is None else biases[index].to(rows.dtype)
    if isinstance(weights, QuantisedWeight):
        own = weights.expert(index)
        rows = rows if own.rows is None else round_rows(rows, own.rows.kind, own.rows.scale)
        return multiply_quantised(rows, own, bias)
    return F.linear(rows, weights[index].to(rows.dtype), bias)


def add_up(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``outputs`` (N, k, width) times ``weights`` (N, k), added up in the order of k: (N, width) float32."""
    total = torch.zeros_like(outputs[:, 0], dtype=torch.float32)
    for place in range(outputs.shape[1]):
        total += outputs[:, place].float() * weights[:, place, None]
    return total


def add_gated(total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    """``total`` (N, width) += sigmoid(``gates`` (N, 1)) * ``x`` (N, width), in float32, rounded once."""
    total.copy_(total.float() + x.float() * gates.float().sigmoid())
