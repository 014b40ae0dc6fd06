"""A short convolution between two gates (LFM2, https://arxiv.org/abs/2511.23404) in plain PyTorch: the compiled
kernels' twin.

A layer's projection makes of each token, for the channels of this rank::

    mixed (N, 3 C) = [ b | c | x ]

Each channel of b x goes through a causal convolution over the last ``taps`` tokens (``kernels/recurrent.py``); the
output is c times that.  ``short_conv_decode`` does so for one token of each row, or for one and the draft tokens after
it, and ``short_conv_prefill`` for many tokens.  All of it is computed in float32.  A row's state is the last
``taps - 1`` products b x, and an update is not idempotent.
"""

from dataclasses import dataclass

import torch

from tp_engine.kernels.layer_ops import widened
from tp_engine.kernels.recurrent import Chunk, Computed, LayerStates, convolve_chunk, convolve_step, in_chunks, in_runs
from tp_engine.model_config.kv_layout import StateKind


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvRule:
    """One layer's constants on this rank; ``conv`` (taps, C) float32, the last row for the token itself."""

    kind: StateKind
    conv: torch.Tensor


def short_conv_decode(
    mixed: torch.Tensor,
    rule: ShortConvRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance B rows by a token each: ``mixed`` (B, 3 C) -> (B, C), in its type.

    ``slots`` (B,) int32, -1 for padding, and ``runs`` (B, 2) int32 are as for
    ``gated_delta_net.gated_delta_net_decode``.
    """

    def step(rows: list[int] | slice) -> torch.Tensor:
        places = torch.where(slots[rows] < 0, len(states.conv) - 1, slots[rows]).long()
        before, behind, x = widened(mixed[rows]).chunk(3, 1)
        turned = convolve_step(before * x, states.conv, places, rule.conv, None)
        return (behind * turned).to(mixed.dtype)

    return in_runs(step, states, slots, runs)


def short_conv_prefill(
    mixed: torch.Tensor, rule: ShortConvRule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """Chunks of prompts: ``mixed`` (N, 3 C) -> (N, C), in its type.  The ``chunks`` hold all tokens, in order."""

    def compute(own: slice, kept: torch.Tensor, state: torch.Tensor) -> Computed:
        before, behind, x = widened(mixed[own]).chunk(3, 1)
        turned, kept = convolve_chunk(before * x, kept, rule.conv, None)
        return (behind * turned).to(mixed.dtype), kept, state

    return in_chunks(compute, rule.kind, states, chunks, widened(mixed[:0]))
