"""Bytes of the KV cache: pure arithmetic, shared by the memory ledger and by the advice given before anything runs."""

from __future__ import annotations

from tp_engine.units import format_gib

SCALE_BYTES = 4


def kv_block_bytes(
    *, num_layers: int, block_size: int, local_num_kv_heads: int, head_dim: int, itemsize: int, scale_bytes: int = 0
) -> int:
    """Bytes of one block on one rank: keys and values of all layers, plus ``scale_bytes`` of a quantised cache."""
    return 2 * num_layers * block_size * local_num_kv_heads * head_dim * itemsize + scale_bytes


def kv_scale_bytes(*, num_layers: int, block_size: int, local_num_kv_heads: int) -> int:
    """Bytes of a quantised block's scales: one float32 per token, head and layer, for keys and for values."""
    return 2 * num_layers * block_size * local_num_kv_heads * SCALE_BYTES


def kv_cache_lines(
    *, num_blocks: int, block_size: int, bytes_per_token: int, max_model_len: int
) -> tuple[str, str, str]:
    """What users look for in the log: the cache in bytes, in tokens, and in requests of the greatest length.

    Bytes are one rank's.
    """
    num_tokens = num_blocks * block_size
    return (
        f"Available KV cache memory: {format_gib(num_tokens * bytes_per_token)}",
        f"GPU KV cache size: {num_tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {num_tokens / max_model_len:.2f}x",
    )
