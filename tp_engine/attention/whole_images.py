"""Tokens of an image that see all of it: Gemma's.  A backend attends as usual, to what comes before each token; then
the outputs of images' tokens are computed anew, over the keys up to the image's end.

A chunk never cuts such an image, so its keys are all in the cache by then, whatever backend stored them.
"""

from collections.abc import Iterable, Sequence

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.calls import attend
from tp_engine.attention.gathering import QueryGroup, RowReader, VisibleKeys, visible_keys
from tp_engine.kernels.kv_cache.block_codes import BlockForm
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

_HIDDEN = float("-inf")
_reader = RowReader()


def attend_to_images(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: LayerKv,
    metadata: AttentionMetadata,
    shape: AttentionShape,
    images: Iterable[QueryGroup],
    simd_width: int = 0,
) -> None:
    """Overwrite ``out`` (N, heads, head_dim) where ``query`` is of ``images``: one request's tokens each, of which the
    last is the image's end.  ``simd_width``: of the backend that keeps ``kv`` (``registry.simd_width``)."""
    block_size, window = kv.cache.shape[2], shape.sliding_window
    rows_per_block = kv.rows_per_block if kv.scales is None else block_size
    for image in images:
        first, count, end = int(image.starts[0]), image.query_len, int(image.seq_lens[0])
        keys = visible_keys(image, window, metadata, block_size, rows_per_block)
        own, device = query[first : first + count], query.device
        mask = None
        if window is not None:
            places = torch.arange(int(keys.first[0]), int(keys.first[0]) + keys.num_keys, device=device)
            queries = torch.arange(end - count, end, device=device)
            is_seen = places > queries[:, None] - window
            mask = torch.zeros(is_seen.shape, dtype=own.dtype, device=device).masked_fill_(~is_seen, _HIDDEN)
        group = shape.num_heads // shape.num_kv_heads
        grouped = own.reshape(count, shape.num_kv_heads, group, -1).permute(2, 1, 0, 3)
        states = (one.to(own.dtype).transpose(0, 1) for one in _states(kv, keys, simd_width))
        key, value = (one.expand(group, -1, -1, -1) for one in states)
        found = attend(grouped, key, value, mask, shape=shape, sinks=None)
        out[first : first + count] = found.permute(2, 1, 0, 3).flatten(1, 2)


def _states(kv: LayerKv, keys: VisibleKeys, simd_width: int) -> Sequence[torch.Tensor]:
    """Keys and values (keys, KV heads, head_dim) of one request, in the order of its tokens."""
    if not simd_width:
        return [_reader.read(kv, part, keys.rows) for part in (0, 1)]
    _, _, block_size, num_heads, head_dim = kv.cache.shape
    form = BlockForm(
        num_parts=2, block_size=block_size, num_kv_heads=num_heads, head_dim=head_dim, dtype=kv.cache.dtype,
        simd_width=simd_width,
    )  # fmt: skip
    blocks = kv.cache.transpose(0, 1)[keys.rows[::block_size] // kv.rows_per_block]
    vectors = form.vectors_of(blocks.flatten(1).view(torch.uint8)).unflatten(2, (num_heads, block_size))
    return list(vectors.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : keys.num_keys])
