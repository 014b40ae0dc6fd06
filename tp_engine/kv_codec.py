"""Which form KV blocks have in the tiers below the pool: the values of ``kv_offloading_codec``, and what they go with.

::

    none         the bytes of the block
    int8, fp8    one byte per element, a scale per token and head                  kernels/block_codes.py

No torch: the configuration is checked before anything else is imported.
"""

from __future__ import annotations

from tp_engine.errors import ConfigError

KV_OFFLOADING_CODECS = ("none", "int8", "fp8")


def is_lossy(codec: str) -> bool:
    """Whether K/V that come back differ from those that went."""
    return codec != "none"


def check_codec(codec: str, *, size_gib: float, kv_cache_dtype: str) -> None:
    """Raise ``ConfigError`` for a codec that has no tier, or that quantises what is quantised already."""
    if not is_lossy(codec):
        return
    if not size_gib:
        raise ConfigError(
            f"kv_offloading_codec is {codec!r}, but kv_offloading_size is 0, so no block leaves the cache: set "
            "kv_offloading_size, or kv_offloading_codec=none"
        )
    if kv_cache_dtype in ("fp8", "int8"):
        raise ConfigError(
            f"kv_offloading_codec is {codec!r}, but the blocks of a cache with kv_cache_dtype={kv_cache_dtype} have 8 "
            "bits already: set kv_offloading_codec=none, which keeps them as they are, or kv_cache_dtype=auto"
        )
