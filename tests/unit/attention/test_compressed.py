"""Attention to a window's rows and to entries, against one softmax per query."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tp_engine.attention import compressed
from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.compressed import CachedEntries, IndexQueries, attend_compressed
from tp_engine.kernels.kv_cache.layer_kv import SCALE_DTYPE, KeyValue, LayerKv, is_quantised, states_at, store_kv

HEADS, DIM, INDEX_DIM, WINDOW, RATE, BLOCK, TOP_K = 2, 8, 4, 5, 4, 8, 3
LENGTHS, QUERIES = (21, 34, 40, 3), (1, 1, 13, 3)  # two decodes, the rest of a prompt, a new one
BLOCKS = 6  # of each request
SHAPE = AttentionShape(
    num_heads=HEADS, num_kv_heads=1, head_dim=DIM, scale=0.3, sliding_window=WINDOW, sinks=torch.tensor([0.4, -0.2]),
    value_dim=DIM,
)  # fmt: skip


def metadata() -> AttentionMetadata:
    """The step; request i has the blocks i, i + 4, and so on."""
    lens, counts = (np.asarray(one, dtype=np.int32) for one in (LENGTHS, QUERIES))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    table = torch.arange(BLOCKS * len(LENGTHS), dtype=torch.int32).view(BLOCKS, -1).T.contiguous()
    return AttentionMetadata(
        num_decodes=2,
        slot_mapping=torch.zeros(int(counts.sum()), dtype=torch.int64),
        block_table=table,
        seq_lens=torch.from_numpy(lens),
        query_start=torch.from_numpy(starts),
        host_query_lens=counts,
        host_seq_lens=lens,
    )


def cache_of(values: torch.Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> LayerKv:
    """A cache of blocks of ``num_rows`` with all of ``values`` (blocks x num_rows, width)."""
    sizes = (1, len(values) // num_rows, num_rows, 1)
    scales = torch.zeros(*sizes[:2], 1, num_rows, dtype=SCALE_DTYPE) if is_quantised(dtype) else None
    kv, rows = LayerKv(torch.zeros(*sizes, values.shape[1], dtype=dtype), scales), values.unsqueeze(1)
    store_kv(KeyValue(rows, rows), kv, torch.arange(len(values)))
    return kv


class Step:
    """What a step reads, in caches of ``dtype``; the same at each call."""

    def __init__(self, dtype: torch.dtype, *, has_index: bool, like: Step | None = None) -> None:
        draw, blocks = torch.Generator().manual_seed(3), BLOCKS * len(LENGTHS)
        count = sum(QUERIES)
        self.query = torch.randn(count, HEADS, DIM, generator=draw)
        sizes = ((BLOCK, DIM), (BLOCK // RATE, DIM), (BLOCK // RATE, INDEX_DIM))
        values = [torch.randn(blocks * rows, width, generator=draw) for rows, width in sizes]
        if like is not None:
            values = [like.read(kv) for kv in like.caches]
        self.caches: list[LayerKv] = [cache_of(own, rows, dtype) for own, (rows, _) in zip(values, sizes, strict=True)]
        queries, weights = (torch.randn(count, HEADS, *more, generator=draw) for more in ((INDEX_DIM,), ()))
        self.index = IndexQueries(queries, weights, self.caches[2], TOP_K) if has_index else None
        self.entries = CachedEntries(self.caches[1], RATE, metadata(), self.index)

    @staticmethod
    def read(kv: LayerKv) -> torch.Tensor:
        return states_at(kv, 0, torch.arange(kv.cache.shape[1] * kv.cache.shape[2])).squeeze(1)

    def attend(self) -> torch.Tensor:
        return attend_compressed(self.query, self.caches[0], metadata(), SHAPE, self.entries)

    def expected(self) -> torch.Tensor:
        """One softmax per query and head."""
        found, table, place = [], metadata().block_table, 0
        for request, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
            blocks = table[request].long()
            rows, entries, keys = (
                self.read(kv).view(-1, size, kv.cache.shape[-1])[blocks].flatten(0, 1)
                for kv, size in zip(self.caches, (BLOCK, BLOCK // RATE, BLOCK // RATE), strict=True)
            )
            for position in range(length - count, length):
                own = entries[: (position + 1) // RATE]
                if self.index is not None and len(own) > TOP_K:
                    scores = (self.index.queries[place] @ keys[: len(own)].T).relu()
                    own = own[(self.index.weights[place] @ scores).topk(TOP_K).indices]
                seen = torch.cat((rows[max(0, position - WINDOW + 1) : position + 1], own))
                assert SHAPE.sinks is not None
                scores = torch.cat((SHAPE.sinks[:, None], self.query[place] @ seen.T * SHAPE.scale), 1)
                found.append(scores.softmax(1)[:, 1:] @ seen)
                place += 1
        return torch.stack(found)


@pytest.mark.parametrize("most_tokens", [1 << 20, 1], ids=["together", "one by one"])
@pytest.mark.parametrize("has_index", [False, True])
def test_it_is_one_softmax(has_index: bool, most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a loop over queries; decodes are computed together, or one by one where they are long."""
    monkeypatch.setattr(compressed, "_MAX_TOKENS", most_tokens)
    step = Step(torch.float32, has_index=has_index)
    torch.testing.assert_close(step.attend(), step.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("has_index", [False, True])
def test_8_bits_change_the_cached_numbers_alone(has_index: bool, dtype: torch.dtype) -> None:
    """Oracle: a float32 cache with the numbers that the codes stand for."""
    step = Step(dtype, has_index=has_index)
    same = Step(torch.float32, has_index=has_index, like=step)
    torch.testing.assert_close(step.attend(), same.attend(), atol=0, rtol=0)
    torch.testing.assert_close(step.attend(), step.expected(), atol=1e-5, rtol=1e-5)
