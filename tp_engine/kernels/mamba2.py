"""Mamba2's state space layer (https://arxiv.org/abs/2405.21060) in plain PyTorch: the twin of the compiled kernels.

A layer's projection makes of each token, for the heads of this rank::

    mixed (N, 2 KH DK + 2 VH DV + VH) = [ C | B | x | z | dt ]

1.  Each channel of C, B and x goes through a causal convolution over the last ``taps`` tokens, with a bias, then SiLU.
    C and B of key head (in the paper: group) i serve the value heads i r to i r + r - 1, where r = VH / KH.
2.  With d = softplus(dt + dt_bias), unbounded, and g = -exp(A_log) d, each value head's state S (DK, DV) is updated::

        S = exp(g) S + B (d x)';  y = S' C + D x

3.  y is multiplied by SiLU(z).  ``norm_groups`` then divides it by the root mean square of its group, which is all
    value heads of a key head, and multiplies it by a weight.

In the terms of ``gated_delta_net``: C is the query, B the key, d x the value.  ``mamba2_decode`` does that for one
token of each row, or for one and the draft tokens after it, and ``mamba2_prefill`` for many tokens, in tiles.  Within a
tile, with c the sums of g and D[i, j] = exp(c_i - c_j) for j <= i::

    Y = exp(c) C S + (C B' * D) V                          S = exp(c_last) S + (exp(c_last - c) B)' V

All of it is computed in float32.  A row's state is as for ``gated_delta_net``, and an update is not idempotent either.
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

CHUNK = 64
TOGETHER = 8  # tiles computed at once; it bounds the memory that a chunk takes


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Rule:
    """One layer's constants on this rank, all float32; ``kind`` has its sizes.

    ``conv`` (taps, channels), the last row for the token itself; ``conv_bias`` (channels,); ``decay`` (VH,) is
    -exp(A_log); ``dt_bias`` and ``skip`` (the paper's D) (VH,).
    """

    kind: StateKind
    conv: torch.Tensor
    conv_bias: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor


def mamba2_decode(
    mixed: torch.Tensor,
    rule: Mamba2Rule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance B rows by a token each: ``mixed`` (B, ...) -> (B, VH DV) float32, not normalised yet.

    ``slots`` and ``runs`` are those of ``gated_delta_net_decode``.
    """
    return in_runs(lambda rows: _decode(mixed[rows], rule, states, slots[rows]), states, slots, runs)


def _decode(mixed: torch.Tensor, rule: Mamba2Rule, states: LayerStates, slots: torch.Tensor) -> torch.Tensor:
    kind = rule.kind
    places = torch.where(slots < 0, len(states.conv) - 1, slots).long()
    inputs, z, dt = split_inputs(widened(mixed), kind)
    query, key, x = _heads(F.silu(convolve_step(inputs, states.conv, places, rule.conv, rule.conv_bias)), kind)
    step, decay = _steps(dt, rule)
    by_key = len(slots), kind.num_key_heads, -1
    old = states.recurrent.index_select(0, places).view(*by_key, kind.key_dim, kind.value_dim)
    value = (x * step.unsqueeze(-1)).reshape(*by_key, 1, kind.value_dim)
    new = old * decay.exp().view(*by_key, 1, 1) + key[:, :, None, :, None] * value
    states.recurrent.index_copy_(0, places, new.flatten(1, 2))
    attended = (new * query[:, :, None, :, None]).sum(-2).flatten(1, 2)
    return _gated(attended, x, z, rule)


def mamba2_prefill(
    mixed: torch.Tensor, rule: Mamba2Rule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """Chunks of prompts: ``mixed`` (N, ...) -> (N, VH DV) float32, not normalised yet.

    The ``chunks`` hold all tokens, in order.
    """

    def compute(own: slice, kept: torch.Tensor, state: torch.Tensor) -> Computed:
        inputs, z, dt = split_inputs(widened(mixed[own]), rule.kind)
        turned, kept = convolve_chunk(inputs, kept, rule.conv, rule.conv_bias)
        found, state = scan_chunk(F.silu(turned), z, dt, rule, state)
        return found, kept, state

    return in_chunks(compute, rule.kind, states, chunks, widened(mixed[:0]))


def scan_chunk(
    turned: torch.Tensor, z: torch.Tensor, dt: torch.Tensor, rule: Mamba2Rule, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's outputs (T, VH DV), and the state after it, (VH, DK, DV), from ``turned`` (T, channels), the convolved
    inputs after SiLU, z (T, VH DV), and dt (T, VH)."""
    query, key, x = _heads(turned, rule.kind)
    step, decay = _steps(dt, rule)
    attended, state = scan_in_chunks(query, key, x * step.unsqueeze(-1), decay, state)
    return _gated(attended, x, z, rule), state


def scan_in_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What T tokens that follow ``state`` (VH, DK, DV) read from it, (T, VH, DV), and the state after them; float32.

    ``query``, ``key`` (T, KH, DK); ``value`` (T, VH, DV); ``decay`` (g) (T, VH).
    """
    parts, state = [], state.reshape(query.shape[1], -1, *state.shape[1:])
    for first in range(0, len(query), TOGETHER * CHUNK):
        own = slice(first, first + TOGETHER * CHUNK)
        attended, state = _scan(query[own], key[own], value[own], decay[own], state)
        parts.append(attended)
    return torch.cat(parts), state.flatten(0, 1)


def _scan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tiles of a chunk at once: only the states between them are sequential.  ``state`` (KH, VH / KH, DK, DV)."""
    num_tokens, size = len(query), min(CHUNK, len(query))
    q, k, v, sums = (in_tiles(x, size, query.shape[1]) for x in (query, key, value, decay))
    sums = sums.cumsum(-1)
    decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril_().exp().tril()
    whole, left = sums[..., -1, None, None].exp(), (sums[..., -1:] - sums).exp().unsqueeze(-1)
    added, before = k.mT @ (left * v), []
    for tile in range(q.shape[2]):
        before.append(state)
        state = torch.addcmul(added[:, :, tile], whole[:, :, tile], state)
    out = sums.exp().unsqueeze(-1) * (q @ torch.stack(before, 2)) + ((q @ k.mT) * decays) @ v
    return out.flatten(2, 3).flatten(0, 1)[:, :num_tokens].transpose(0, 1), state


def group_squares(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The sum of squares of each group of a row's elements: ``x`` (N, width) float32 -> (N, groups) float32."""
    groups: torch.Tensor = x.unflatten(1, (num_groups, -1))
    return groups.square().sum(-1)


def norm_groups(
    x: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float, squares: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """RMS norm of each group of a row's elements: ``x`` (N, width) float32, ``weight`` (width,) -> (N, width), in the
    type of ``weight``.

    ``squares`` (N, groups) float32 are the sums over whole groups of ``group_size`` elements, where a rank has only
    parts of them; None: this rank has whole groups.
    """
    if squares is None:
        squares = group_squares(x, num_groups)
    factors = (squares / group_size + eps).rsqrt()
    normed: torch.Tensor = x.unflatten(1, (num_groups, -1)) * factors.unsqueeze(-1)
    return (normed.flatten(1) * widened(weight)).to(weight.dtype)


def split_inputs(mixed: torch.Tensor, kind: StateKind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The convolution's inputs (N, channels), z (N, VH DV), dt (N, VH)."""
    sizes = kind.num_channels, kind.num_value_heads * kind.value_dim, kind.num_value_heads
    inputs, z, dt = mixed.split_with_sizes(sizes, 1)
    return inputs, z, dt


def _heads(turned: torch.Tensor, kind: StateKind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, channels) -> C and B (N, KH, DK), x (N, VH, DV)."""
    width = kind.num_key_heads * kind.key_dim
    query, key, x = turned.split_with_sizes((width, width, kind.num_value_heads * kind.value_dim), 1)
    query, key = (one.reshape(-1, kind.num_key_heads, kind.key_dim) for one in (query, key))
    return query, key, x.reshape(-1, kind.num_value_heads, kind.value_dim)


def _steps(dt: torch.Tensor, rule: Mamba2Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """d and g, each (N, VH)."""
    step = F.softplus(dt + rule.dt_bias)
    return step, rule.decay * step


def _gated(attended: torch.Tensor, x: torch.Tensor, z: torch.Tensor, rule: Mamba2Rule) -> torch.Tensor:
    """(N, VH, DV) -> (N, VH DV)."""
    return (attended + rule.skip.unsqueeze(-1) * x).flatten(1) * F.silu(z)
