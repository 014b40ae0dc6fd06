"""Logits scaled and capped, in plain PyTorch."""

from __future__ import annotations

import torch

from tp_engine.kernels.widening import widened


def cap_logits(logits: torch.Tensor, scale: float, cap: float | None) -> None:
    """``logits`` (n, width) times ``scale``, then with a ``cap`` (> 0) ``cap * tanh(logits / cap)``, in place."""
    scaled = widened(logits) * scale
    logits.copy_(scaled if cap is None else (scaled / cap).tanh_() * cap)
