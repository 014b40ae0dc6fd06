"""Which part of a checkpoint's tensor belongs to which rank.  Pure arithmetic on names and shapes, no torch.

::

    COLUMN    rows [r * n, (r + 1) * n)           q_proj, gate_proj, up_proj, and their biases
    KV_HEADS  rows of the rank's KV heads         k_proj, v_proj: fewer heads than ranks repeat (K=2, W=4: 0 0 1 1)
    ROW       columns [r * n, (r + 1) * n)        o_proj, down_proj
    VOCAB     rows [r * n, (r + 1) * n) of the    embed_tokens, lm_head: the last ranks may get fewer rows, or none
              padded vocabulary
    WHOLE     everything                          norms, biases of row-parallel layers
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Split(enum.Enum):
    """How a tensor is divided among the ranks."""

    WHOLE = enum.auto()
    COLUMN = enum.auto()
    ROW = enum.auto()
    KV_HEADS = enum.auto()
    VOCAB = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """``size`` elements from ``start`` along ``dim`` of a tensor; ``room`` is what the destination has for them.

    ``room`` exceeds ``size`` only for a padded vocabulary.
    """

    dim: int
    start: int
    size: int
    room: int


def shard_of(
    split: Split, shape: tuple[int, ...], *, rank: int, world_size: int, num_kv_heads: int = 0, vocab_rows: int = 0
) -> Shard:
    """This rank's part of a tensor of ``shape``.

    ``num_kv_heads`` are those of the whole model; ``vocab_rows`` are this rank's rows of the padded vocabulary.
    """
    if split is Split.WHOLE:
        return Shard(dim=0, start=0, size=shape[0], room=shape[0])
    if split is Split.VOCAB:
        start = min(rank * vocab_rows, shape[0])
        return Shard(dim=0, start=start, size=min(vocab_rows, shape[0] - start), room=vocab_rows)
    if split is Split.KV_HEADS:
        # Ranks that share a head count as one part.
        num_parts = min(num_kv_heads, world_size)
        assert world_size % num_parts == 0 and num_kv_heads % num_parts == 0, (num_kv_heads, world_size)
        return _equal_part(0, shape[0], rank * num_parts // world_size, num_parts)
    return _equal_part(1 if split is Split.ROW else 0, shape[1 if split is Split.ROW else 0], rank, world_size)


def _equal_part(dim: int, size: int, part: int, num_parts: int) -> Shard:
    assert size % num_parts == 0, (size, num_parts)
    share = size // num_parts
    return Shard(dim=dim, start=part * share, size=share, room=share)
