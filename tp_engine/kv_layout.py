"""The KV cache on paper: which layers share block tables, how long their blocks are kept, and what they take and hold.

Layers whose K/V lives equally long and has the same shape form *groups* of equal size.  A block of the pool holds
``block_size`` tokens of one group's layers, so all blocks have the same bytes, and every group has a table of its own::

    6 layers, 5 of them with a window        pool  | b0 | b1 | b2 | b3 | b4 | b5 | b6 | ...
                                                       one layer each: 6 groups
    group 0   layer 5, full                  row 0: 0 6 12 18 24 ...     all blocks are kept
    group 1   layer 0, window                row 0: . .  . 19 25 ...     those behind the window are free again
    ...
    group 5   layer 4, window                row 0: . .  . 23 29 ...

A model whose layers are all alike has one group, and a block holds all of its layers.

No torch and no numpy: the advice before a start reads it too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tp_engine.units import ceil_div, format_gib

MAX_GROUPS = 8
# Kernels begin at the start of a tile: so many keys behind a window may still be read, and are hidden by a mask.
TILE_TOKENS = 128
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KvKind:
    """What the layers of one group have in common.  ``window`` counts the visible keys, self included; None: all.

    ``num_kv_heads`` are the whole model's.
    """

    window: int | None
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """``layers`` in rising order; blocks wholly behind ``window`` are given back, None keeps them all."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a model, those that keep all blocks first; see the module's text.

    Each layer keeps ``num_kv_heads`` (the whole model's) keys and values of ``head_dim`` per token.
    """

    groups: tuple[KvGroup, ...]
    num_kv_heads: int
    head_dim: int

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each group's window."""
        return tuple(group.window for group in self.groups)

    @property
    def layers_per_block(self) -> int:
        """Layers that a block has room for: those of the largest group."""
        return max(len(group.layers) for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """Whether there is one group, which keeps all of its blocks: as many as its tokens fill."""
        return self.windows == (None,)

    def blocks_for(self, num_tokens: int, block_size: int, chunk_tokens: int) -> int:
        """The most blocks of all groups that a sequence of up to ``num_tokens`` holds at once.

        A group with a window holds the window, what kernels may read before it, the chunk of up to ``chunk_tokens``
        that is computed, and one block more, because none of these need begin with a block.
        """
        whole = ceil_div(num_tokens, block_size)
        return sum(
            whole if window is None else min(whole, ceil_div(window + TILE_TOKENS + chunk_tokens, block_size) + 1)
            for window in self.windows
        )

    def place_of(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and its place in the group's blocks."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise AssertionError(f"layer {layer} is in no group")


def lay_out(kinds: Sequence[KvKind]) -> KvLayout:
    """The layout of a model whose layer i is of ``kinds[i]``; all have as many KV heads of the same size.

    Each kind is cut into groups as large as the rarest kind, so that blocks have little unused room.  There is one
    group where all layers are alike, and where the cut would need more than ``MAX_GROUPS`` tables per row.
    """
    ((num_kv_heads, head_dim),) = {(kind.num_kv_heads, kind.head_dim) for kind in kinds}
    layers_of: dict[KvKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        layers_of.setdefault(kind, []).append(layer)
    size = min(map(len, layers_of.values()))
    num_groups = sum(ceil_div(len(layers), size) for layers in layers_of.values())
    if num_groups > MAX_GROUPS:
        window = kinds[0].window if len({kind.window for kind in layers_of}) == 1 else None
        return KvLayout((KvGroup(layers=tuple(range(len(kinds))), window=window),), num_kv_heads, head_dim)
    ordered = sorted(layers_of, key=lambda kind: (kind.window is not None, kind.window or 0))
    groups = []
    for kind in ordered:
        layers = layers_of[kind]
        count = ceil_div(len(layers), size)
        for index in range(count):
            first, end = index * len(layers) // count, (index + 1) * len(layers) // count
            groups.append(KvGroup(layers=tuple(layers[first:end]), window=kind.window))
    return KvLayout(tuple(groups), num_kv_heads, head_dim)


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


@dataclass(slots=True, kw_only=True)
class MoveCounters:
    """What has been moved since the start: bytes, and the seconds that it took; ``wait_s``: steps waited for moves."""

    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    wait_s: float = 0.0


def kv_cache_lines(*, num_bytes: int, num_tokens: int, max_model_len: int) -> tuple[str, str, str]:
    """The log lines that users look for: the cache in bytes, in tokens, and in requests of the greatest length.

    Bytes are one rank's.
    """
    return (
        f"Available KV cache memory: {format_gib(num_bytes)}",
        f"GPU KV cache size: {num_tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {num_tokens / max_model_len:.2f}x",
    )
