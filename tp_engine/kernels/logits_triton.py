"""Logits scaled and capped, in place: the Triton twin of ``logits``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.tanh_triton import tanh

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def cap_logits_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    WIDTH: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
    CAP: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: up to BLOCK logits of one row; a CAP of 0 bounds nothing."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = logits + row * stride + column
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32) * SCALE
    if CAP > 0:
        values = CAP * tanh(values / CAP)
    tl.store(place, values.to(logits.dtype.element_ty), mask=inside)


def cap_logits_triton(logits: torch.Tensor, scale: float, cap: float | None) -> None:
    """``logits.cap_logits``; the rows of ``logits`` may be slices of wider ones."""
    num_rows, width = logits.shape
    assert logits.stride(1) == 1, (logits.shape, logits.stride())
    if num_rows:
        cap_logits_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            logits,
            logits.stride(0),
            WIDTH=width,
            SCALE=scale,
            CAP=cap or 0.0,
            BLOCK=_BLOCK,
            **dependent_launch(logits.device),
        )
