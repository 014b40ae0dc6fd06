"""The maps of latent attention, head by head: the Triton twins of ``latents.absorb_w_uk`` and ``project_w_uv``.

::

    absorb    query (n, heads, nope + rope)  ->  [ nope K_h | rope ]     (n, heads, rank + rope)
    project   means (n, heads, rank)         ->  means V_h^T             (n, heads, value_dim)

    grid (heads, blocks of outputs, blocks of rows)      the programs of a head's first outputs copy its rope part too

The library's batched product is the same in one launch, and the copy is another one.  Here the first columns of a
program's map are read before the kernel that makes its rows has ended (``dependent_launch_triton``).
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous

_FEW_ROWS, _MANY_ROWS = 16, 64


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def latent_map_kernel(
    x, up, out, num_rows, x_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr, FIRST: tl.constexpr, HEAD_STRIDE: tl.constexpr, STEP_IN: tl.constexpr,
    STEP_OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_OUT outputs of ROWS rows of one head, whose rows are WIDTH wide; their first IN elements are
    multiplied, and the TAIL behind them is copied.  A head's map begins at FIRST."""
    let_next_begin(PDL)
    head, block = tl.program_id(0), tl.program_id(1)
    column, term = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    place = up + head * HEAD_STRIDE + FIRST + term[:, None] * STEP_IN + column[None, :] * STEP_OUT
    inside = (column < OUT)[None, :]
    weight = tl.load(place, mask=inside & (term < IN)[:, None], other=0.0)
    wait_for_previous(PDL)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    own = x + row.to(tl.int64)[:, None] * x_stride + head * WIDTH
    total = tl.zeros([ROWS, BLOCK_OUT], dtype=tl.float32)
    for start in tl.static_range(0, IN, BLOCK_IN):
        if start > 0:
            weight = tl.load(place + start * STEP_IN, mask=inside & (start + term < IN)[:, None], other=0.0)
        states = tl.load(own + (start + term)[None, :], mask=is_row & (start + term < IN)[None, :], other=0.0)
        total = tl.dot(states, weight, total, input_precision="ieee")
    result = out + (row.to(tl.int64)[:, None] * HEADS + head) * (OUT + TAIL)
    tl.store(result + column[None, :], total.to(out.dtype.element_ty), mask=is_row & inside)
    if TAIL > 0:
        tail = tl.arange(0, TAIL_PAD)[None, :]
        is_tail = is_row & (tail < TAIL) & (block == 0)
        tl.store(result + OUT + tail, tl.load(own + IN + tail, mask=is_tail, other=0.0), mask=is_tail)


def absorb_w_uk_triton(query: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """``absorb_w_uk`` in one launch; a token's heads are contiguous."""
    rank = up.shape[2]
    return _launch(query, up, terms=nope_dim, outputs=rank, first=0, step_in=rank, step_out=1)


def project_w_uv_triton(attended: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """``project_w_uv`` in one launch."""
    _, size, rank = up.shape
    return _launch(attended, up, terms=rank, outputs=size - nope_dim, first=nope_dim * rank, step_in=1, step_out=rank)


def _launch(
    x: torch.Tensor, up: torch.Tensor, *, terms: int, outputs: int, first: int, step_in: int, step_out: int
) -> torch.Tensor:
    num_rows, heads, width = x.shape
    tail = width - terms
    assert x.stride(2) == 1 and x.stride(1) == width and up.is_contiguous() and up.shape[0] == heads
    out = torch.empty((num_rows, heads, outputs + tail), dtype=x.dtype, device=x.device)
    if num_rows:
        rows = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
        block_out, block_in = min(64, _padded(outputs)), min(128 if x.dtype.itemsize == 2 else 64, _padded(terms))
        latent_map_kernel[(heads, triton.cdiv(outputs, block_out), triton.cdiv(num_rows, rows))](
            x, up, out, num_rows, x.stride(0), HEADS=heads, WIDTH=width, IN=terms, OUT=outputs, TAIL=tail,
            TAIL_PAD=triton.next_power_of_2(max(tail, 1)), FIRST=first, HEAD_STRIDE=up.stride(0), STEP_IN=step_in,
            STEP_OUT=step_out, ROWS=rows, BLOCK_OUT=block_out, BLOCK_IN=block_in, **dependent_launch(x.device),
        )  # fmt: skip
    return out


def _padded(size: int) -> int:
    """A side of a matrix product: a power of two, 16 at least."""
    return max(16, int(triton.next_power_of_2(size)))
