"""How ``x @ weight.T + bias`` is computed: the plain way, or with a weight that was reordered once for oneDNN.

oneDNN can keep a weight in its own blocked order.  On a CPU with AVX-512 that took half the time of ``F.linear``: from
8 rows on in float32, with few rows in bfloat16.  The functions for it belong to torch's private interface, so they are
probed and their result is compared before it is trusted.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

PACKED_DTYPES = (torch.float32, torch.bfloat16)

# A float32 product of one row with a small weight is faster the plain way: up to this size, both orders are kept.
SMALL_WEIGHT_ELEMENTS = 1 << 19


class LinearMethod(Protocol):
    """A weight of shape (out, in), ready to be applied.  ``needs_weight``: whether it still reads the original."""

    needs_weight: bool

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, out), in the type of ``x``."""


class PlainLinear:
    """``F.linear``."""

    needs_weight = True

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


class PackedLinear:
    """oneDNN with the weight in its own blocked order; a float32 weight that is small is kept for single rows too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.needs_weight = weight.dtype == torch.float32 and weight.numel() <= SMALL_WEIGHT_ELEMENTS
        self._plain = weight if self.needs_weight else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._plain is not None and x.shape[0] == 1:
            return F.linear(x, self._plain, bias)
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return packed


_trusted: dict[tuple[torch.dtype, torch.Size], bool] = {}


def choose_linear_method(weight: torch.Tensor) -> LinearMethod:
    """The fastest method that is known to work for this weight.  Called once its values are final."""
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES:
        return PlainLinear(weight)
    try:
        packed = PackedLinear(weight)
        key = (weight.dtype, weight.shape)
        if key not in _trusted:
            _trusted[key] = _agrees(packed, weight)
    except (AttributeError, RuntimeError):
        return PlainLinear(weight)
    return packed if _trusted[key] else PlainLinear(weight)


def _agrees(packed: PackedLinear, weight: torch.Tensor) -> bool:
    """Whether the packed product equals the plain one to within rounding, with a bias, for two rows."""
    out_size, in_size = weight.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, in_size, generator=generator).to(weight.dtype)
    bias = torch.randn(out_size, generator=generator).to(weight.dtype)
    expected = F.linear(x, weight, bias)
    found = packed(x, bias)
    scale = expected.abs().max().item() + 1.0
    return (found - expected).abs().max().item() <= 8 * torch.finfo(weight.dtype).eps * scale
