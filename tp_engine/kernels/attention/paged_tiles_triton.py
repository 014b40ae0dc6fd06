"""Parts of the paged attention kernels: one tile of cached keys and values against the queries of a program.

Grouped queries are packed: the rows of a program's matrices are all query heads of one KV head, of a few queries::

    row m = query m // GROUP, head kv_head * GROUP + m % GROUP

so that a tile of keys is read once for all of them and the products run on matrix units.  Scores are in units of log 2.

A sink is a head's score without a key: it takes part in the sum of a row's softmax and adds nothing to the result.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tp_engine.kernels.elementwise_triton import tanh
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


def cache_arguments(kv: LayerKv) -> tuple[torch.Tensor, ...]:
    """Keys, values and their scales; the cache stands in for scales that do not exist, and is not read as such."""
    scales = kv.cache if kv.scales is None else kv.scales
    return kv.cache[0], kv.cache[1], scales[0], scales[1]


def score_scale(scale: float, softcap: float | None) -> float:
    """The factor of products in ``attend_tile``: to units of log 2, or with a soft cap to parts of the cap."""
    return scale * LOG2_E if softcap is None else scale / softcap


def layer_constants(
    query: torch.Tensor, kv: LayerKv, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> dict[str, Any]:
    """The constants of both kernels, from the shapes of ``query`` (N, heads, head_dim) and of the cache."""
    _, num_heads, head_dim = query.shape
    _, _, block_size, num_kv_heads, _ = kv.cache.shape
    assert query.stride(2) == 1 and query.stride(1) == head_dim, "a token's heads must be contiguous"
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous()), "each head needs its sink"
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": kv.block_stride,
        "SCALE_STRIDE": kv.scale_stride,
        "WINDOW": window or 0,
        "QUANTISED": kv.scales is not None,
        "SOFTCAP": 0.0 if softcap is None else softcap * LOG2_E,
        "HAS_SINKS": sinks is not None,
    }


@jit
def to_float16(states):
    """``states`` in half precision, clamped to its range; NaN stays NaN."""
    return tl.clamp(states.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@jit
def places_of(table_row, start, length, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids, 64 bits, and offsets in them of the positions from ``start`` on, a multiple of TILE.

    Positions that are not below ``length`` get block 0: nothing is read there.
    """
    position = start + tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table_row + position // BLOCK_SIZE, mask=position < length, other=0).to(tl.int64)
    return block, position % BLOCK_SIZE


@jit
def load_states(cache, first, is_key, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """(TILE, HEAD_PAD) of ``cache``, each row from element ``first`` (TILE,) on; zeros without a key, or from HEAD_DIM.

    Memory of other requests may hold anything, even NaN, so it is never read.
    """
    column = tl.arange(0, HEAD_PAD)
    place = cache + first[:, None] + column[None, :]
    if HEAD_PAD != HEAD_DIM:
        states = tl.load(place, mask=is_key[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        states = tl.load(place, mask=is_key[:, None], other=0.0)
    else:
        states = tl.load(place)
    return states


@jit
def attend_tile(
    query, accumulated, total, peak, key_cache, value_cache, key_scales, value_scales, table_row, start, length, own,
    kv_head, scale,
    MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr, QUANTISED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the keys at positions ``start`` to ``start`` + TILE of one request.

    ``query`` (ROWS, HEAD_PAD); ``accumulated`` (ROWS, HEAD_PAD), ``total`` and ``peak`` (ROWS,) float32; ``own``
    (ROWS,) positions of the queries; ``scale`` as ``score_scale`` makes it; SOFTCAP, in units of log 2, bounds the
    scores unless it is 0.  Without MASKED all the keys are visible to all queries.  Returns the state.
    """
    position = start + tl.arange(0, TILE)
    is_key = position < length
    block, offset = places_of(table_row, start, length, TILE, BLOCK_SIZE)
    first = block * BLOCK_STRIDE + (offset * NUM_KV_HEADS + kv_head) * HEAD_DIM
    keys = load_states(key_cache, first, is_key, MASKED, HEAD_DIM, HEAD_PAD).to(query.dtype)
    values = load_states(value_cache, first, is_key, MASKED, HEAD_DIM, HEAD_PAD).to(query.dtype)

    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if QUANTISED:
        place = block * SCALE_STRIDE + kv_head * BLOCK_SIZE + offset
        scores *= tl.load(key_scales + place, mask=is_key, other=0.0)[None, :]
    if SOFTCAP > 0:
        scores = SOFTCAP * tanh(scores)
    if MASKED:
        visible = position[None, :] <= own[:, None]
        if WINDOW > 0:
            visible = visible & (position[None, :] > own[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    value_scales_of_tile = 1.0
    if QUANTISED:
        value_scales_of_tile = tl.load(value_scales + place, mask=is_key, other=0.0)
    return add_tile(scores, values, value_scales_of_tile, accumulated, total, peak, QUANTISED)


@jit
def add_tile(scores, values, scales, accumulated, total, peak, QUANTISED: tl.constexpr):
    """The state of the online softmax after a tile: ``scores`` (ROWS, TILE), -inf where hidden, of ``values`` (TILE,
    width), which have ``scales`` (TILE,) if QUANTISED.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # If no key has been visible so far, a difference of infinities would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    accumulated = accumulated * shrink[:, None]
    if QUANTISED:
        # Relative to the tile's largest scale: in half precision the scales themselves may be too small.
        largest = tl.max(scales, axis=0)
        weights *= (scales / tl.where(largest > 0, largest, 1.0))[None, :]
        accumulated += tl.dot(weights.to(values.dtype), values, input_precision="ieee") * largest
    else:
        accumulated = tl.dot(weights.to(values.dtype), values, accumulated, input_precision="ieee")
    return accumulated, total, new_peak


@jit
def with_sinks(accumulated, total, peak, sinks, head, counts):
    """The state of the online softmax after one more score, that of ``sinks`` (heads,) at ``head`` (ROWS,).

    Only if it ``counts``: a sink counts in one split of each row.
    """
    sink = tl.where(counts, tl.load(sinks + head) * _LOG2_E, float("-inf"))
    new_peak = tl.maximum(peak, sink)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    return accumulated * shrink[:, None], total * shrink + tl.exp2(sink - base), new_peak
