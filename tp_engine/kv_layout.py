"""Which layers share block tables, and how long their blocks are kept.  No torch.

Layers whose K/V lives equally long and has the same shape form *groups* of equal size.  A block of the pool holds
``block_size`` tokens of one group's layers, so all blocks have the same bytes, and every group has a table of its own::

    6 layers, 5 of them with a window        pool  | b0 | b1 | b2 | b3 | b4 | b5 | b6 | ...
                                                       one layer each: 6 groups
    group 0   layer 5, full                  row 0: 0 6 12 18 24 ...     all blocks are kept
    group 1   layer 0, window                row 0: . .  . 19 25 ...     those behind the window are free again
    ...
    group 5   layer 4, window                row 0: . .  . 23 29 ...

A model whose layers are all alike has one group, and a block holds all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tp_engine.units import ceil_div

MAX_GROUPS = 8
# Keys behind a window that kernels may still read, and hide by a mask: they begin at the start of a tile.
TILE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KvKind:
    """What layers of one group have in common.  ``window`` counts the visible keys, self included; None: all.

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
    """The groups of a model, those that keep all blocks first; see the module's text."""

    groups: tuple[KvGroup, ...]

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

        A window's group holds the window and what kernels may read before it, the chunk of up to ``chunk_tokens`` that
        is computed, and a block more, as none of them need begin with a block.
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
    """The layout of a model whose layer i is of ``kinds[i]``.

    Each kind is cut into groups as large as the rarest kind, so that no block has much room to spare.  Where that would
    take more than ``MAX_GROUPS`` tables per row, and where all layers are alike, there is one group.
    """
    layers_of: dict[KvKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        layers_of.setdefault(kind, []).append(layer)
    size = min(map(len, layers_of.values()))
    num_groups = sum(ceil_div(len(layers), size) for layers in layers_of.values())
    if num_groups > MAX_GROUPS:
        assert len({(kind.num_kv_heads, kind.head_dim) for kind in layers_of}) == 1, "layers differ in shape"
        window = kinds[0].window if len({kind.window for kind in layers_of}) == 1 else None
        return KvLayout((KvGroup(layers=tuple(range(len(kinds))), window=window),))
    ordered = sorted(layers_of, key=lambda kind: (kind.window is not None, kind.window or 0))
    groups = []
    for kind in ordered:
        layers = layers_of[kind]
        count = ceil_div(len(layers), size)
        for index in range(count):
            first, end = index * len(layers) // count, (index + 1) * len(layers) // count
            groups.append(KvGroup(layers=tuple(layers[first:end]), window=kind.window))
    return KvLayout(tuple(groups))
