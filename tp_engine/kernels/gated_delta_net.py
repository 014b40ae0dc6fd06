"""The gated delta rule (https://arxiv.org/abs/2412.06464) in plain PyTorch: the twin of the compiled kernels.

A layer's projections make of each token, for the heads of this rank::

    mixed (N, 2 KH DK + 2 VH DV) = [ q | k | v | z ]        gates (N, 2 VH) = [ b | a ]

1.  Each channel of q, k and v goes through a causal convolution over the last ``taps`` tokens, then SiLU.
2.  q and k are L2-normalised (1e-6 is added to the squared norm); q is multiplied by DK^-0.5.  Key head i serves the
    value heads i r to i r + r - 1, where r = VH / KH.
3.  With beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias), each value head's state S (DK, DV) is updated::

        S = exp(g) S;  S = S + k (beta (v - S' k))';  o = S' q

4.  o is divided by its root mean square (with eps), then multiplied by a weight and by SiLU(z).

``gated_delta_net_decode`` does that for one token of each row, or for one and the draft tokens after it, and
``gated_delta_net_prefill`` for many tokens, in chunks: the state before a chunk enters only by products with it, so a
chunk's tokens are computed together.
Within a chunk, with c the sums of g, D[i, j] = exp(c_i - c_j) for j <= i, and A the part of beta (K K') * D below the
diagonal::

    (I + A) U = beta V      (I + A) W = beta exp(c) K      V' = U - W S
    O = exp(c) Q S + (Q K' * D) V'                         S = exp(c_last) S + (exp(c_last - c) K)' V'

All of it is computed in float32.  A row's state is its recurrent matrices and the last ``taps - 1`` inputs of the
convolution.  An update is not idempotent: whoever runs a step twice must restore the states in between.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import widened
from tp_engine.kernels.recurrent import (
    Chunk,
    Computed,
    LayerStates,
    convolve_chunk,
    convolve_step,
    in_chunks,
    in_runs,
    in_tiles,
)
from tp_engine.model_config.kv_layout import StateKind

LENGTH_EPS = 1e-6
CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """One layer's constants on this rank, all float32; ``kind`` has its sizes.

    ``conv`` (taps, channels), the last row for the token itself; ``decay`` (VH,) is -exp(A_log); ``dt_bias`` (VH,);
    ``norm`` (DV,).
    """

    kind: StateKind
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


def gated_delta_net_decode(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance B rows by a token each: ``mixed`` (B, ...), ``gates`` (B, 2 VH) -> (B, VH DV), in the type of ``mixed``.

    Row i changes the states in ``slots[i]`` (B,) int32, which are distinct, and not the last slot of all.  A slot of -1
    is padding: its output is arbitrary, and it may change the last slot, which no row has.  Without ``runs`` nothing
    waits for the device, so a CUDA graph can hold this twin too.

    ``runs`` (B, 2) int32: some rows are draft rows, which continue others.  ``runs[i]`` is the index of row i's first
    draft row, which its others follow, and their number, or (0, -1) for a draft row.  The state after each token goes
    to the slot of its own row; a draft row's slot is not read.
    """
    return in_runs(lambda rows: _decode(mixed[rows], gates[rows], rule, states, slots[rows]), states, slots, runs)


def _decode(
    mixed: torch.Tensor, gates: torch.Tensor, rule: DeltaRule, states: LayerStates, slots: torch.Tensor
) -> torch.Tensor:
    kind = rule.kind
    places = torch.where(slots < 0, len(states.conv) - 1, slots).long()
    inputs, z = _split(widened(mixed), kind)
    query, key, value = heads_of(F.silu(convolve_step(inputs, states.conv, places, rule.conv, None)), kind)
    decay, beta = _decay_and_beta(gates, rule)
    by_key = len(slots), kind.num_key_heads, -1
    old = states.recurrent.index_select(0, places).view(*by_key, kind.key_dim, kind.value_dim)
    old = old * decay.exp().view(*by_key, 1, 1)
    column = key[:, :, None, :, None]
    change = (value.reshape(*by_key, kind.value_dim) - (old * column).sum(-2)) * beta.reshape(*by_key, 1)
    new = old + column * change.unsqueeze(-2)
    states.recurrent.index_copy_(0, places, new.flatten(1, 2))
    attended = (new * query[:, :, None, :, None]).sum(-2).flatten(1, 2)
    return _gated_norm(attended, z, rule).to(mixed.dtype)


def gated_delta_net_prefill(
    mixed: torch.Tensor, gates: torch.Tensor, rule: DeltaRule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """Chunks of prompts: ``mixed`` (N, ...), ``gates`` (N, 2 VH) -> (N, VH DV), in the type of ``mixed``.

    The ``chunks`` hold all tokens, in order.
    """

    def compute(own: slice, kept: torch.Tensor, state: torch.Tensor) -> Computed:
        inputs, z = _split(widened(mixed[own]), rule.kind)
        turned, kept = convolve_chunk(inputs, kept, rule.conv, None)
        query, key, value = heads_of(F.silu(turned), rule.kind)
        attended, state = attend_in_chunks(query, key, value, *_decay_and_beta(gates[own], rule), state)
        return _gated_norm(attended, z, rule).to(mixed.dtype), kept, state

    return in_chunks(compute, rule.kind, states, chunks, widened(mixed[:0]))


def attend_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs (T, VH, DV) of T tokens that follow ``state`` (VH, DK, DV), and the state after them; float32.

    ``query``, ``key`` (T, KH, DK), normalised; ``value`` (T, VH, DV); ``decay`` (g), ``beta`` (T, VH).
    """
    num_tokens, num_key_heads = len(query), query.shape[1]
    size = min(CHUNK, num_tokens)
    q, k, v, sums, beta = (in_tiles(x, size, num_key_heads) for x in (query, key, value, decay, beta))
    sums, beta = sums.cumsum(-1), beta.unsqueeze(-1)
    distance = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril_()
    decays = distance.exp().tril()
    system = beta * (k @ k.mT) * decays
    both = torch.cat((beta * v, beta * sums.exp().unsqueeze(-1) * k), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, of_state = solved.split_with_sizes((value.shape[-1], key.shape[-1]), -1)
    scores = (q @ k.mT) * decays
    q = q * sums.exp().unsqueeze(-1)
    k = k * (sums[..., -1:] - sums).exp().unsqueeze(-1)
    whole = sums[..., -1, None, None].exp()
    state = state.reshape(num_key_heads, -1, *state.shape[1:])
    parts = []
    for chunk in range(q.shape[2]):
        new = values[:, :, chunk] - of_state[:, :, chunk] @ state
        parts.append(q[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = whole[:, :, chunk] * state + k[:, :, chunk].mT @ new
    out = torch.cat(parts, 2).flatten(0, 1)[:, :num_tokens]
    return out.transpose(0, 1), state.flatten(0, 1)


def _split(mixed: torch.Tensor, kind: StateKind) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution's inputs (N, channels), and z (N, VH, DV)."""
    inputs, z = mixed[:, : kind.num_channels], mixed[:, kind.num_channels :]
    return inputs, z.view(-1, kind.num_value_heads, kind.value_dim)


def heads_of(turned: torch.Tensor, kind: StateKind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, channels) -> query and key (N, KH, DK), normalised, and value (N, VH, DV)."""
    width = kind.num_key_heads * kind.key_dim
    query, key, value = turned.split_with_sizes((width, width, kind.num_value_heads * kind.value_dim), 1)
    query, key = (x.reshape(-1, kind.num_key_heads, kind.key_dim) for x in (query, key))
    query, key = (x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt() for x in (query, key))
    return query * kind.key_dim**-0.5, key, value.reshape(-1, kind.num_value_heads, kind.value_dim)


def _decay_and_beta(gates: torch.Tensor, rule: DeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, each (N, VH)."""
    b, a = widened(gates).chunk(2, 1)
    return rule.decay * F.softplus(a + rule.dt_bias), b.sigmoid()


def _gated_norm(attended: torch.Tensor, z: torch.Tensor, rule: DeltaRule) -> torch.Tensor:
    """(N, VH, DV) -> (N, VH DV)."""
    normed = F.rms_norm(attended, attended.shape[-1:], rule.norm, rule.eps)
    return (normed * F.silu(z)).flatten(1)
