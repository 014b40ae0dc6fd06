"""The type that twins compute in: at least float32."""

from __future__ import annotations

import torch


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
