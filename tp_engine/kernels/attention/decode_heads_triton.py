"""Heads prepared inside decode attention: the device functions of ``heads_triton``, called by ``paged_decode_triton``.

::

    program (KV head, split) of a request     its queries, prepared: each split of a KV head for itself
    the program with the request's last tile  before that: the new key, prepared, and value to the cache
                                              all threads meet, then it reads its tiles, the new key among them

No other program reads the new position: the splits of a request end where another's tiles begin, and other requests'
rows, which must be of other positions, do not see it.  ``heads`` are only read, so the order of programs is free.
Two rows that stand for one request at consecutive positions (``worker/batch/lanes.py``) would read each other's new
keys.

The halves of a head, prepared apart, are put together again as the factor of a matrix product.  So heads are whole:
their size is a power of two and all of it turns, or none.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tp_engine.kernels.attention.heads import HeadNorm, Rotation, UnpreparedHeads
from tp_engine.kernels.attention.heads_triton import load_parts, prepared_parts, store_in_cache
from tp_engine.kernels.kv_cache.layer_kv import LayerKv


def can_prepare(head_dim: int, norm: HeadNorm | None, rotation: Rotation | None, kv: LayerKv) -> bool:
    """Whether decode attention can prepare heads like these; the rule for all that it leaves to ``prepare_heads``."""
    return (
        kv.scales is None
        and head_dim & (head_dim - 1) == 0
        and (norm is None or not norm.includes_values)
        and (rotation is None or (rotation.rotary_dim == head_dim and rotation.query_scale is None))
    )


def head_arguments(new: UnpreparedHeads | None) -> tuple[Any, ...]:
    """Gains, the rotation's table and positions, slots, and the norm's epsilon; nothing if heads are prepared."""
    if new is None:
        return None, None, None, None, 0.0
    norm, rotation = new.norm, new.rotation
    gains, eps = (None, 0.0) if norm is None else (norm.weights, norm.eps)
    table, positions = (None, None) if rotation is None else (rotation.table, rotation.positions)
    return gains, table, positions, new.slot_mapping, eps


def head_constants(new: UnpreparedHeads | None) -> dict[str, Any]:
    """Whether heads are prepared, and what is done to them."""
    norm = None if new is None else new.norm
    return {
        "PREPARES": new is not None,
        "NORMALISES": norm is not None,
        "OFFSET": 0.0 if norm is None else norm.offset,
        "TURNS": new is not None and new.rotation is not None,
    }


@triton.jit  # type: ignore[untyped-decorator]
def prepared_queries(  # type: ignore[no-untyped-def]
    own_heads,
    norm_weights,
    eps,
    table,
    positions,
    token,
    head,
    is_row,
    ROWS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    NORMALISES: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    TURNS: tl.constexpr,  # noqa: N803
):
    """Queries ``head`` (ROWS,) of ``token``, whose heads are at ``own_heads``: (ROWS, HEAD_DIM) in their own type."""
    HALF: tl.constexpr = HEAD_DIM // 2  # noqa: N806
    pair, place = tl.arange(0, HALF)[None, :], own_heads + head[:, None] * HEAD_DIM
    # fmt: off
    a, b, _ = prepared_parts(place, norm_weights, eps, table, positions, token, pair, pair, is_row[:, None],
                             HALF, 0, NORMALISES, OFFSET, TURNS)
    # fmt: on
    halves = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(halves, (ROWS, HEAD_DIM)).to(own_heads.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def store_new_states(  # type: ignore[no-untyped-def]
    own_heads,
    norm_weights,
    eps,
    table,
    positions,
    slot_mapping,
    key_cache,
    value_cache,
    token,
    kv_head,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    BLOCK_STRIDE: tl.constexpr,  # noqa: N803
    NORMALISES: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    TURNS: tl.constexpr,  # noqa: N803
):
    """Prepare the key of ``token`` for KV head ``kv_head`` and store it and the value, unless its slot is -1.

    Afterwards all threads of the program may read them.
    """
    HALF: tl.constexpr = HEAD_DIM // 2  # noqa: N806
    pair, is_head = tl.arange(0, HALF)[None, :], tl.arange(0, 1)[:, None] == 0
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        place = own_heads + (NUM_HEADS + kv_head) * HEAD_DIM
        weight = norm_weights
        if NORMALISES:
            weight += NUM_HEADS * HEAD_DIM
        # fmt: off
        a, b, _ = prepared_parts(place, weight, eps, table, positions, token, pair, pair, is_head,
                                 HALF, 0, NORMALISES, OFFSET, TURNS)
        store_in_cache(a, b, a, key_cache, key_cache, slot, kv_head, pair, pair, is_head,
                       HALF, 0, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, 0, 0.0, False)
        a, b, _ = load_parts(place + NUM_KV_HEADS * HEAD_DIM, pair, pair, is_head, HALF, 0)
        store_in_cache(a, b, a, value_cache, value_cache, slot, kv_head, pair, pair, is_head,
                       HALF, 0, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, 0, 0.0, False)
        # fmt: on
    tl.debug_barrier()  # its own threads read the new key and value from memory
