"""Attention: heads, the paged cache, latents and chosen keys."""

from collections.abc import Iterator

import numpy as np
import torch

from tp_engine.cpu import index as native_index
from tp_engine.cpu import latents as native_latents
from tp_engine.cpu import ops
from tp_engine.cpu.paged_attention import PagedAttention, in_kernel_order
from tp_engine.cpu.self_check.base import BLOCK_SIZE, Check, KernelChecks
from tp_engine.kernels.attention import heads as head_twins
from tp_engine.kernels.attention import index_keys, latents
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.attention.plain_attention import attend
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, dequantise, is_quantised, quantise
from tp_engine.kernels.layer_ops import NormRule

_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 24
# (queries, keys) of each request.
_REQUESTS = ((1, 9), (3, 40))
_SCALE, _SOFTCAP = 0.2, 1.5


class AttentionChecks(KernelChecks):
    """The attention of one step, and what is made of heads, latents and index keys before it."""

    def heads(self) -> Iterator[Check]:
        """Operations on queries and keys."""
        heads, weights = self.draw(3, _HEADS + 2 * _KV_HEADS, _HEAD_DIM), self.draw(_HEADS + _KV_HEADS, _HEAD_DIM)
        norm = HeadNorm(q_weight=weights[0], k_weight=weights[-1], weights=weights, eps=1e-5, offset=1.0)
        positions, scale = (
            torch.tensor([4, 0, 2], dtype=torch.int64, device="cpu"),
            torch.rand(5, generator=self.generator, dtype=torch.float32, device="cpu") + 0.5,
        )
        for own_norm, rotation in (
            (None, Rotation(self.draw(5, _HEAD_DIM), positions)),
            (norm, Rotation(self.draw(5, 10), positions, scale)),
        ):
            given = (heads, _KV_HEADS, own_norm, rotation, None, positions)
            yield from self.both(ops, head_twins, "qk_norm_rope_store", *given)
        counts, squares = (_HEADS, _KV_HEADS), head_twins.head_squares(heads, _HEADS, _KV_HEADS)
        yield from self.both(ops, head_twins, "head_squares", heads, *counts)
        widths = (_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM)
        yield from self.both(ops, head_twins, "norm_width", heads, *counts, squares, weights, widths, 1e-5)

    def latents(self) -> Iterator[Check]:
        """Latent attention's small operations, for more tokens than share what is read; then the attention to its
        rows."""
        query, rows, up = self.draw(5, 2, 14), self.draw(5, 40), self.draw(2, 17, 36) / 10
        rule, rotation = (
            NormRule(self.draw(36), 1e-6),
            Rotation(self.draw(9, 4), torch.arange(5, dtype=torch.int64, device="cpu")),
        )
        given = (query, rows, rule, rotation, True, None, torch.zeros(5, dtype=torch.float32, device="cpu"))
        yield from self.both(native_latents, latents, "prepare_latents", *given)
        yield from self.both(native_latents, latents, "absorb_w_uk", query, up, 10)
        absorbed = latents.absorb_w_uk(query, up, 10)
        means = absorbed[..., :36].contiguous()
        yield from self.both(native_latents, latents, "project_w_uv", means, up, 10)
        cache, out = self.draw(1, 13, BLOCK_SIZE, 1, 40), torch.empty_like(means[:2])
        table = torch.randperm(13, generator=self.generator, dtype=torch.int64, device="cpu").int().view(1, 13)
        attention = self.one_request(2, 50, table)
        attention(absorbed[:2].contiguous(), None, cache, out, scale=_SCALE)
        kept = cache[0, table[0].long()].view(1, 52, 40)[:, :50].float()
        hidden = torch.full((2, 50), float("-inf"), dtype=torch.float32, device="cpu").triu(49)
        by_head = absorbed[:2].float().transpose(0, 1)
        attended = attend(by_head, kept, kept[..., :36], hidden, scale=_SCALE, softcap=None, sinks=None)
        yield "paged_attention of latents", out, attended.transpose(0, 1)

    def one_request(self, num_queries: int, num_keys: int, table: torch.Tensor) -> PagedAttention:
        """Return the attention of a step with one request, whose keys are stored."""
        attention = PagedAttention(self.library)
        lengths, start, keys = np.array([[num_queries], [0], [num_keys]], dtype=np.int32)
        attention.set_step(lengths, start, keys, table, torch.full((num_queries,), -1, dtype=torch.int64, device="cpu"))
        return attention

    def index(self) -> Iterator[Check]:
        """Index queries and keys: what becomes of them, and what is stored of the keys."""
        slots, positions = (torch.tensor(places, dtype=torch.int64, device="cpu") for places in ([5, -1, 2], [4, 0, 2]))
        norm = index_keys.KeyNorm(self.draw(20), self.draw(20), 1e-5)
        queries, keys, rotation = self.draw(3, 2, 20), self.draw(3, 20), Rotation(self.draw(5, 12), positions)
        for is_interleaved in (False, True):
            given = queries, keys, norm, rotation, is_interleaved, None, slots
            yield from self.both(native_index, index_keys, "prepare_index", *given)
            kv = LayerKv(torch.zeros(1, 2, BLOCK_SIZE, 1, 20, dtype=self.dtype, device="cpu"))
            native_index.prepare_index(
                self.library, queries.clone(), keys.clone(), norm, rotation, is_interleaved, kv, slots
            )
            _, turned = index_keys.prepare_index(*given)
            assert turned is not None, "nothing stores them"
            expected = torch.zeros(2 * BLOCK_SIZE, 20, dtype=self.dtype, device="cpu")
            expected[slots[::2]] = turned[::2]
            yield "prepare_index, stored", kv.cache.flatten(0, 3), expected

    def chosen_keys(self) -> Iterator[Check]:
        """One decode's choice, of whole numbers, so that neither types nor the order of sums change a score; then
        attention to rows at the chosen places."""
        table = torch.randperm(13, generator=self.generator, dtype=torch.int64, device="cpu").int().view(1, 13)
        sizes = (1, 3, 8), (52, 8), (1, 3)
        query, keys, weights = (
            torch.randint(-2, 3, size, generator=self.generator, dtype=torch.int64, device="cpu") for size in sizes
        )
        index_kv = LayerKv(keys.to(self.dtype).view(1, 13, BLOCK_SIZE, 1, 8))
        given = (
            query.to(self.dtype),
            weights.float(),
            1.0,
            index_kv,
            table,
            torch.tensor([50], dtype=torch.int32, device="cpu"),
            9,
        )
        yield from self.both(native_index, index_keys, "choose_keys", *given)
        chosen = index_keys.choose_keys(*given)
        heads, cache = self.draw(1, 2, 24), self.draw(1, 13, BLOCK_SIZE, 1, 24)
        out = torch.empty(1, 2, 20, dtype=self.dtype, device="cpu")
        self.one_request(1, 50, table)(heads, None, cache, out, scale=_SCALE, chosen=chosen)
        rows = cache[0, table[0].long()].view(1, 52, 24)[:, chosen.positions[0].long()].float()
        by_head, seen = heads.float().transpose(0, 1), torch.zeros(1, 9, dtype=torch.float32, device="cpu")
        attended = attend(by_head, rows, rows[..., :20], seen, scale=_SCALE, softcap=None, sinks=None)
        yield "paged_attention to chosen keys", out, attended.transpose(0, 1)

    def attention(self) -> Iterator[Check]:
        """Output of two requests in scattered blocks, and the same by softmax over explicit scores."""
        query_lens, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*_REQUESTS, strict=True))
        num_tokens, num_blocks = int(query_lens.sum()), 14
        blocks = torch.randperm(num_blocks, generator=self.generator, dtype=torch.int32, device="cpu")
        table = torch.zeros(2, 10, dtype=torch.int32, device="cpu")
        table[0, :3], table[1, :10] = blocks[:3], blocks[3:13]
        kv_cache, query = (
            self.draw(2, num_blocks, BLOCK_SIZE, _KV_HEADS, _HEAD_DIM),
            self.draw(num_tokens, _HEADS, _HEAD_DIM),
        )
        starts, sinks = np.cumsum(query_lens, dtype=np.int32) - query_lens, self.wide(_HEADS)
        attention = PagedAttention(self.library)
        attention.set_step(
            query_lens, starts, seq_lens, table, torch.full((num_tokens,), -1, dtype=torch.int64, device="cpu")
        )
        for name, cache_dtype, softcap, own_sinks in (
            ("paged_attention", self.dtype, None, None),
            ("paged_attention with a softcap and sinks", self.dtype, _SOFTCAP, sinks),
            ("paged_attention to int8", torch.int8, _SOFTCAP, sinks),
            ("paged_attention to fp8", torch.float8_e4m3fn, None, None),
        ):
            states, scales = kv_cache, None
            if is_quantised(cache_dtype):
                states, token_scales = quantise(kv_cache, cache_dtype)
                kv_cache, scales = dequantise(states, token_scales), token_scales.transpose(2, 3).contiguous()
            out, cache = torch.empty_like(query), in_kernel_order(self.library, states)
            attention(query, None, cache, out, scales=scales, scale=_SCALE, softcap=softcap, sinks=own_sinks)
            expected = [
                _attend_plainly(
                    query[start : start + length], kv_cache[:, row.long()].flatten(1, 2)[:, :total], softcap, own_sinks
                )
                for start, length, total, row in zip(starts, query_lens, seq_lens, table, strict=True)
            ]
            yield name, out, torch.cat(expected)


def _attend_plainly(
    query: torch.Tensor, keys_values: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """``query`` (n, heads, head_dim), the last of ``keys_values`` (2, tokens, KV heads, head_dim); in float32."""
    keys, values = keys_values.float().repeat_interleave(_HEADS // _KV_HEADS, 2).transpose(1, 2)
    num_queries, num_keys = len(query), keys.shape[1]
    hidden = torch.full((num_queries, num_keys), float("-inf"), dtype=torch.float32, device="cpu").triu(
        num_keys - num_queries + 1
    )
    by_head, own_sinks = query.float().transpose(0, 1), None if sinks is None else sinks.view(-1, 1, 1)
    out = attend(by_head, keys, values, hidden, scale=_SCALE, softcap=softcap, sinks=own_sinks)
    return out.transpose(0, 1)
