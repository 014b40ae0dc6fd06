"""Kimi delta attention (https://arxiv.org/abs/2510.26692) in plain PyTorch: the twin of the compiled kernels.

The gated delta rule (``gated_delta_net.py``) with a decay of its own for each element of a key.  A layer's projections
make of each token, for the H heads of this rank, each of D elements::

    mixed (N, 3 H D) = [ q | k | v ]      beta (N, H)      decay (N, H D)      z (N, H D)

q, k and v go through the convolution and SiLU, and q and k are normalised, as there.  Then, with b = sigmoid(beta) and
x = decay + dt_bias::

    g = -exp(A_log) softplus(x)                  or, with a lower bound L < 0 of g,  L sigmoid(exp(A_log) x)
    S = diag(exp(g)) S;  S = S + k (b (v - S' k))';  o = S' q

o is divided by its root mean square (with eps), then multiplied by a weight and by sigmoid(z).

Within a chunk, with c the sums of g, a pair of tokens i >= j has the product p(i, j) = sum over the elements d of
a key of x_i[d] exp(c_i[d] - c_j[d]) k_j[d].  With A that of keys (x = k) below the diagonal, times beta, and P that of
queries (x = q)::

    (I + A) U = b V      (I + A) W = b exp(c) K      V' = U - W S
    O = exp(c) Q S + P V'                            S = diag(exp(c_last)) S + (exp(c_last - c) K)' V'

No sum of decays is exponentiated but of a token back to one before it, so nothing overflows.  All of it is computed in
float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.gated_delta_net import heads_of
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

CHUNK = 16


@dataclass(frozen=True, slots=True, eq=False)
class KdaRule:
    """One layer's constants on this rank, all float32; ``kind`` has its sizes.

    ``conv`` (taps, channels), the last row for the token itself; ``decay`` (H,) is -exp(A_log); ``dt_bias`` (H D,);
    ``norm`` (D,); ``lower_bound`` is below 0, or 0: there is none.
    """

    kind: StateKind
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    lower_bound: float


def kda_decode(
    mixed: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    z: torch.Tensor,
    rule: KdaRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance B rows by a token each -> (B, H D), in the type of ``mixed``; slots and runs as in
    ``gated_delta_net_decode``."""

    def step(rows: list[int] | slice) -> torch.Tensor:
        return _decode((mixed[rows], beta[rows], decay[rows], z[rows]), rule, states, slots[rows])

    return in_runs(step, states, slots, runs)


def _decode(inputs: tuple[torch.Tensor, ...], rule: KdaRule, states: LayerStates, slots: torch.Tensor) -> torch.Tensor:
    mixed, beta, decay, z = inputs
    places = torch.where(slots < 0, len(states.conv) - 1, slots).long()
    turned = F.silu(convolve_step(widened(mixed), states.conv, places, rule.conv, None))
    query, key, value = heads_of(turned, rule.kind)
    old = states.recurrent.index_select(0, places) * _log_decays(decay, rule).exp().unsqueeze(-1)
    change = (value - (old * key.unsqueeze(-1)).sum(-2)) * widened(beta).sigmoid().unsqueeze(-1)
    new = old + key.unsqueeze(-1) * change.unsqueeze(-2)
    states.recurrent.index_copy_(0, places, new)
    return _gated_norm((new * query.unsqueeze(-1)).sum(-2), z, rule).to(mixed.dtype)


def kda_prefill(
    mixed: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    z: torch.Tensor,
    rule: KdaRule,
    states: LayerStates | None,
    chunks: list[Chunk],
) -> torch.Tensor:
    """Chunks of prompts -> (N, H D), in the type of ``mixed``; the ``chunks`` hold all tokens, in order."""

    def compute(own: slice, kept: torch.Tensor, state: torch.Tensor) -> Computed:
        turned, kept = convolve_chunk(widened(mixed[own]), kept, rule.conv, None)
        query, key, value = heads_of(F.silu(turned), rule.kind)
        attended, state = attend_in_chunks(
            query, key, value, _log_decays(decay[own], rule), widened(beta[own]).sigmoid(), state
        )
        return _gated_norm(attended, z[own], rule).to(mixed.dtype), kept, state

    return in_chunks(compute, rule.kind, states, chunks, widened(mixed[:0]))


def attend_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs (T, H, D) of T tokens that follow ``state`` (H, D, D), and the state after them; float32.

    ``query``, ``key`` (T, H, D), normalised; ``value`` (T, H, D); ``decay`` (g) (T, H, D); ``beta`` (T, H).
    """
    num_tokens, num_heads = key.shape[:2]
    size = min(CHUNK, num_tokens)
    q, k, v, sums, beta = (in_tiles(x, size, num_heads).squeeze(1) for x in (query, key, value, decay, beta))
    sums, beta, parts = sums.cumsum(-2), beta.unsqueeze(-1), []
    for chunk in range(q.shape[1]):
        own_q, own_k, own_v, own, step = (x[:, chunk] for x in (q, k, v, sums, beta))
        back = (own.unsqueeze(2) - own.unsqueeze(1)).exp()  # (H, i, j, D); above the diagonal it may be infinite
        back = back.masked_fill(torch.ones_like(back[0, ..., 0], dtype=torch.bool).triu(1).unsqueeze(-1), 0.0)
        seen = back * own_k.unsqueeze(1)
        system, scores = (torch.einsum("hid,hijd->hij", x, seen) for x in (own_k, own_q))
        both = torch.cat((step * own_v, step * own.exp() * own_k), -1)
        solved = torch.linalg.solve_triangular(step * system, both, upper=False, unitriangular=True)
        made, of_state = solved.split_with_sizes((value.shape[-1], key.shape[-1]), -1)
        new = made - of_state @ state
        parts.append((own_q * own.exp()) @ state + scores @ new)
        last = own[:, -1:]
        state = last.mT.exp() * state + (own_k * (last - own).exp()).mT @ new
    return torch.cat(parts, 1)[:, :num_tokens].transpose(0, 1), state


def _log_decays(decay: torch.Tensor, rule: KdaRule) -> torch.Tensor:
    """g, (N, H, D)."""
    x = (widened(decay) + rule.dt_bias).unflatten(1, (rule.kind.num_key_heads, -1))
    rate = rule.decay.unsqueeze(-1)
    return rule.lower_bound * (-rate * x).sigmoid() if rule.lower_bound else rate * F.softplus(x)


def _gated_norm(attended: torch.Tensor, z: torch.Tensor, rule: KdaRule) -> torch.Tensor:
    """(N, H, D) -> (N, H D)."""
    normed = F.rms_norm(attended, attended.shape[-1:], rule.norm, rule.eps)
    return normed.flatten(1) * widened(z).sigmoid()
