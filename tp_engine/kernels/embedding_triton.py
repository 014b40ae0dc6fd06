"""Embedding of this rank's part of the vocabulary in one launch: the Triton twin of ``embedding``.

::

    program (i, j): elements [j * BLOCK, (j + 1) * BLOCK) of token i's row; zeros where the rank does not hold its id
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous

_MAX_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def embed_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    weight,
    out,
    FIRST_ID: tl.constexpr,  # noqa: N803
    NUM_IDS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: up to BLOCK of the SIZE elements of one token's row, of the NUM_IDS rows from FIRST_ID on."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token).to(tl.int64) - FIRST_ID
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = (row >= 0) & (row < NUM_IDS)
    inside = column < SIZE
    values = tl.load(weight + row * SIZE + column, mask=inside & is_held, other=0.0)
    if SCALE != 1:
        values = (values.to(tl.float32) * SCALE).to(values.dtype)
    tl.store(out + token * SIZE + column, values, mask=inside)


def embed_triton(
    token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0
) -> torch.Tensor:
    """``embedding.embed``; with ``first_id`` None too, ids that ``weight`` does not hold give zeros."""
    num_ids, size = weight.shape
    assert weight.is_contiguous() and token_ids.is_contiguous(), (weight.stride(), token_ids.stride())
    out = torch.empty((len(token_ids), size), dtype=weight.dtype, device=weight.device)
    if len(token_ids):
        block = min(int(triton.next_power_of_2(size)), _MAX_BLOCK)
        embed_kernel[(len(token_ids), triton.cdiv(size, block))](
            token_ids,
            weight,
            out,
            FIRST_ID=first_id or 0,
            NUM_IDS=num_ids,
            SIZE=size,
            BLOCK=block,
            SCALE=scale,
            **dependent_launch(weight.device),
        )
    return out
