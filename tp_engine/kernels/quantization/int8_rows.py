"""Rows of activations as 8-bit codes, for products with int8 weights, and the products' rows scaled back.

::

    scale[n]   = max |x[n]| / 127
    code[n, i] = round(x[n, i] / scale[n]) + 128         1 .. 255, unsigned, as x86 instructions take it
    out[n, o]  = products[n, o] * scale[n] + bias[o]

Each row has a scale of its own, so a request's result does not depend on the other requests of its step.
"""

from typing import Protocol

import torch

CODE_OFFSET = 128
LARGEST_CODE = 127
_SMALLEST_LARGEST = 1e-30  # keeps the scale of a row of zeros from being zero


class Int8Rows(Protocol):
    """Both operations, in one implementation."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` (N, in) -> codes (N, in) uint8 and scales (N,) float32.  The scale of a row with NaN is NaN."""

    def scale(
        self, products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """``products`` (N, out) float32, ``scales`` (N,), ``bias`` (out,) in ``dtype`` -> (N, out) in ``dtype``."""


class TorchInt8Rows:
    """Plain PyTorch: the twin of the compiled kernels."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        largest = wide.abs().amax(1).clamp_min(_SMALLEST_LARGEST)
        codes = torch.round(wide * (LARGEST_CODE / largest).unsqueeze(1)).nan_to_num() + CODE_OFFSET
        return codes.to(torch.uint8), largest / LARGEST_CODE

    def scale(
        self, products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        scaled = products * scales.unsqueeze(1)
        return (scaled if bias is None else scaled + bias.float()).to(dtype)
