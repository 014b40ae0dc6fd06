"""The layers' small operations in plain PyTorch: normalisation, the residual sum, activations, embedding, logits.

The twins of ``norm_triton``, ``elementwise_triton`` and ``cpu/ops.py``.  Each computes in float32 (float64 stays) and
rounds once, unless its text says otherwise.

::

    RMS norm    x / sqrt(mean(x^2) + eps) * (weight + offset)                https://arxiv.org/abs/1910.07467
    centred     the same of x - mean(x): layer norm without a bias           https://arxiv.org/abs/1607.06450

    silu            silu(gate) * up                                    SwiGLU, https://arxiv.org/abs/2002.05202
    gelu_tanh       gelu(gate), by its tanh formula, * up
    swiglu_clamped  (u + 1) * g * sigmoid(alpha * g)                   g = min(gate, limit), u = up within +-limit
    silu_clamped    silu(g) * u                                        g and u as above
    relu2           max(up, 0)^2, without a gate                        https://arxiv.org/abs/2109.08668
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.model_config.head_gate import GateFunction
from tp_engine.model_config.mlp import Activation


@dataclass(frozen=True, slots=True, eq=False)
class NormRule:
    """How rows are normalised: by ``weight`` (size,) + ``offset``; ``is_centred`` first subtracts the mean."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0
    is_centred: bool = False


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the type that twins compute in: float64 if it has it, else float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm(x: torch.Tensor, rule: NormRule) -> torch.Tensor:
    """``x`` (N, size) normalised over its last dimension -> (N, size), in the type of ``x``."""
    if not (rule.offset or rule.is_centred):
        return F.rms_norm(x, rule.weight.shape, rule.weight, rule.eps)
    wide = widened(x)
    if rule.is_centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + rule.eps).rsqrt()
    return (scaled * (widened(rule.weight) + rule.offset)).to(x.dtype)


def gate_heads(x: torch.Tensor, gate: torch.Tensor, function: GateFunction = "sigmoid") -> None:
    """Multiply ``x`` (N, size) by ``function`` of ``gate`` (N, count), in place: each element of a gate counts for size
    / count elements that follow one another.  Rows of ``gate`` may lie apart."""
    factor = widened(gate).sigmoid() if function == "sigmoid" else F.softplus(widened(gate))
    x.copy_((widened(x).unflatten(1, (gate.shape[1], -1)) * factor.unsqueeze(2)).flatten(1))


def add(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0, stream_scale: float = 1.0) -> None:
    """Add ``x * scale`` to ``residual`` (both (N, size)), and multiply the sum by ``stream_scale``, in place."""
    if scale == stream_scale == 1.0:
        residual.add_(x)
    else:
        residual.copy_((widened(residual) + widened(x) * scale) * stream_scale)


def copy_rows(rows: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``rows`` to ``target`` (both (N, size)); rows of either may lie apart."""
    target.copy_(rows)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, stream_scale: float = 1.0
) -> torch.Tensor:
    """``add``, and return the normalised stream."""
    add(x, residual, scale, stream_scale)
    return norm(residual, rule)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply an MLP's activation: ``gate_up`` (N, 2 * size), gate then up, -> (N, size), the activated gate times up;
    without a gate (N, size) -> (N, size).

    The activated gate is rounded before the product, as the models' own code does; ``swiglu_clamped`` is rounded once.
    """
    if activation.kind == "relu2":
        return F.relu(gate_up).square_()
    first, up = gate_up.chunk(2, -1)
    if activation.kind == "swiglu_clamped":
        limit, bounded = activation.limit, widened(first).clamp(max=activation.limit)
        product = (widened(up).clamp(-limit, limit) + 1) * bounded * (bounded * activation.alpha).sigmoid()
        return product.to(gate_up.dtype)
    if activation.kind == "silu_clamped":
        return F.silu(first.clamp(max=activation.limit)).mul_(up.clamp(-activation.limit, activation.limit))
    if activation.kind == "silu":
        return F.silu(first).mul_(up)
    return F.gelu(first, approximate="tanh").mul_(up)


def embed(token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0) -> torch.Tensor:
    """``token_ids`` (N,) -> (N, hidden): rows of ``weight`` (ids, hidden) times ``scale``.

    ``weight`` holds this rank's part of the vocabulary: its first row belongs to the token ``first_id``, and other
    ranks' ids give zeros.  With ``first_id`` None it holds all ids.
    """
    if first_id is None:
        rows = F.embedding(token_ids, weight)
    else:
        own = token_ids - first_id
        is_mine = (own >= 0) & (own < len(weight))
        rows = F.embedding(own.mul_(is_mine), weight).mul_(is_mine.unsqueeze(-1))
    return rows if scale == 1.0 else rows.mul_(scale)


def cap_logits(logits: torch.Tensor, scale: float, cap: float | None) -> None:
    """``logits`` (n, width) times ``scale``, then with a ``cap`` (> 0) ``cap * tanh(logits / cap)``, in place."""
    scaled = widened(logits) * scale
    logits.copy_(scaled if cap is None else (scaled / cap).tanh_() * cap)
