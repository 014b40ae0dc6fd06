"""A decode step of a short convolution between two gates, in one launch: the Triton twin of
``short_conv.short_conv_decode``."""

import torch

from tp_engine.kernels.recurrent import LayerStates
from tp_engine.kernels.recurrent_triton import causal_conv
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
