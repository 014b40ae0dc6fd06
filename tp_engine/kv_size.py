"""Bytes of the KV cache and what it holds: pure arithmetic, for the memory ledger and for the advice before a start."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tp_engine.kv_layout import KvLayout
from tp_engine.units import format_gib

SCALE_BYTES = 4


def kv_block_bytes(
    *, num_layers: int, block_size: int, local_num_kv_heads: int, head_dim: int, itemsize: int, scale_bytes: int = 0
) -> int:
    """Bytes of one block on one rank: keys and values of its layers, plus ``scale_bytes`` of a quantised cache."""
    return 2 * num_layers * block_size * local_num_kv_heads * head_dim * itemsize + scale_bytes


def kv_scale_bytes(*, num_layers: int, block_size: int, local_num_kv_heads: int) -> int:
    """Bytes of a quantised block's scales: one float32 per token, head and layer, for keys and for values."""
    return 2 * num_layers * block_size * local_num_kv_heads * SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """What blocks of ``block_size`` tokens hold of requests of up to ``max_model_len`` tokens.

    ``chunk_tokens``: the most tokens of a request that one step computes.
    """

    layout: KvLayout
    block_size: int
    max_model_len: int
    chunk_tokens: int

    @property
    def blocks_per_request(self) -> int:
        """Blocks that a request of ``max_model_len`` tokens needs."""
        return self._blocks_for(self.max_model_len)

    def num_tokens(self, num_blocks: int) -> int:
        """Tokens that ``num_blocks`` hold; where windows let blocks go, those of requests of the greatest length."""
        if self.layout.keeps_all:
            return num_blocks * self.block_size
        return num_blocks * self.max_model_len // self.blocks_per_request

    def longest_request(self, num_blocks: int) -> int:
        """Tokens of the longest request, up to ``max_model_len``, that ``num_blocks`` hold."""
        return bisect_right(range(self.max_model_len + 1), num_blocks, key=self._blocks_for) - 1

    def _blocks_for(self, num_tokens: int) -> int:
        return self.layout.blocks_for(num_tokens, self.block_size, self.chunk_tokens)


def kv_cache_lines(*, num_bytes: int, num_tokens: int, max_model_len: int) -> tuple[str, str, str]:
    """What users look for in the log: the cache in bytes, in tokens, and in requests of the greatest length.

    Bytes are one rank's.
    """
    return (
        f"Available KV cache memory: {format_gib(num_bytes)}",
        f"GPU KV cache size: {num_tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {num_tokens / max_model_len:.2f}x",
    )
