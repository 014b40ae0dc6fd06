"""Which part of a dimension belongs to which rank.  Pure arithmetic.

::

    equal     [r * n, (r + 1) * n)                query heads, inner sizes
    KV heads  those of the rank's KV heads        fewer heads than ranks repeat (K=2, W=4: 0 0 1 1)
    vocab     [r * n, (r + 1) * n) of the         the last ranks may get fewer rows, or none
              padded vocabulary
"""

from __future__ import annotations

from tp_engine.weights.source import Span


def equal_share(size: int, rank: int, world_size: int) -> Span:
    """One of ``world_size`` equal parts; the configuration checks have found that it divides."""
    assert size % world_size == 0, f"{size} is not divisible by {world_size}"
    share = size // world_size
    return Span(rank * share, share)


def kv_head_share(num_kv_heads: int, rank: int, world_size: int) -> Span:
    """The KV heads of one rank.  Ranks that share a head count as one part."""
    num_parts = min(num_kv_heads, world_size)
    assert world_size % num_parts == 0, f"{num_kv_heads} KV heads on {world_size} ranks"
    return equal_share(num_kv_heads, rank * num_parts // world_size, num_parts)


def vocab_share(vocab_size: int, rank: int, num_rows: int) -> Span:
    """The token ids of one rank, which has room for ``num_rows``."""
    start = min(rank * num_rows, vocab_size)
    return Span(start, min(num_rows, vocab_size - start))


def times(heads: Span, head_dim: int) -> Span:
    """The rows of ``heads``, each of ``head_dim``."""
    return Span(heads.start * head_dim, heads.size * head_dim)
