"""A short convolution between two gates: the Triton twins of ``short_conv.short_conv_decode`` and
``short_conv_prefill``, one launch each."""

import torch

from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.recurrent_triton import causal_conv, conv_chunks
from tp_engine.kernels.short_conv import ShortConvRule


def short_conv_decode_triton(
    mixed: torch.Tensor,
    rule: ShortConvRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """``short_conv.short_conv_decode``; rows of ``mixed`` may lie apart, and padding changes no slot at all."""
    channels = rule.kind.num_channels
    assert mixed.shape[1] == 3 * channels, mixed.shape
    out = torch.empty((len(mixed), channels), dtype=mixed.dtype, device=mixed.device)
    causal_conv(mixed, rule.conv, states, slots, runs, out, is_gated=True)
    return out


def short_conv_prefill_triton(
    mixed: torch.Tensor, rule: ShortConvRule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """``short_conv.short_conv_prefill``; rows of ``mixed`` may lie apart."""
    out = torch.empty((len(mixed), rule.kind.num_channels), dtype=mixed.dtype, device=mixed.device)
    conv_chunks(mixed, rule.conv, states, chunks, out, is_gated=True)
    return out
