"""Root mean square normalisation as one pass over memory: the Triton twin of ``norm``.

One program holds one token's row, so that it is read once: x, and where there is one the residual, which is written
back as their sum.  The sum is rounded to the residual's type before it is normalised, as the twin does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.norm import NormRule

MAX_SIZE = 1 << 16
_ELEMENTS_PER_THREAD = 8
_MAX_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: one row of SIZE elements, added to the residual where ADDS."""
    let_next_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    values = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        place = residual + token * residual_stride + column
        values += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    tl.store(out + token * SIZE + column, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def norm_triton(x: torch.Tensor, rule: NormRule) -> torch.Tensor:
    """``norm.norm``; the rows of ``x`` may be slices of wider ones."""
    return _launch(x, None, rule)


def add_norm_triton(x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0) -> torch.Tensor:
    """``norm.add_norm``, which reads and writes every element once."""
    assert residual.shape == x.shape and residual.stride(1) == 1, (residual.shape, residual.stride())
    assert scale == 1.0, f"the kernel does not scale x, by {scale}"
    return _launch(x, residual, rule)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, rule: NormRule) -> torch.Tensor:
    num_tokens, size = x.shape
    weight = rule.weight
    assert not (rule.offset or rule.is_centred), rule
    assert x.stride(1) == 1 and weight.shape == (size,), (x.shape, x.stride(), weight.shape)
    assert size <= MAX_SIZE, f"rows of {size} elements; one program holds at most {MAX_SIZE}"
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block, num_warps = row_launch(size)
    norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        rule.eps,
        SIZE=size,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=num_warps,
        **dependent_launch(x.device),
    )
    return out


def row_launch(size: int) -> tuple[int, int]:
    """The block and the warps of a program that holds a row of ``size`` elements."""
    block = int(triton.next_power_of_2(size))
    return block, min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)
