"""The KV cache on paper: which layers share block tables, how long their blocks are kept, and what they take and hold.

Layers whose K/V lives equally long and has the same shape form *groups*.  A block of the pool holds ``block_size``
tokens of one group's layers; all blocks have the same bytes, and every group has a table of its own::

    6 layers, 5 of them with a window        pool  | b0 | b1 | b2 | b3 | b4 | b5 | b6 | ...
                                                       one layer each: 6 groups
    group 0   layer 5, full                  row 0: 0 6 12 18 24 ...     all blocks are kept
    group 1   layer 0, window                row 0: . .  . 19 25 ...     those before the window are free again
    ...
    group 5   layer 4, window                row 0: . .  . 23 29 ...

A model whose layers are all alike has one group, and a block holds all of its layers.  Where layers differ in KV heads
or head_dim, a block holds more of the small ones; what a group does not fill is padding::

    2 full layers of 1 x 8, 2 windowed ones of 1 x 16        | layer 0 | layer 1 |   | layer 2           |

Layers with a recurrent state instead of K/V form the *state group*.  It has no blocks: each row of the batch has one
slot with the states of all these layers, however long its sequence is, in a pool of its own.

The grouping follows from what a rank keeps, so it may differ between numbers of ranks: KV heads of one kind of layer
may be split where those of another are repeated.

No torch and no numpy: the advice before a start reads it too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from tp_engine.system.units import ceil_div, format_gib, round_up

MAX_GROUPS = 12
# Kernels begin at the start of a tile: this many keys before a window may still be read, and are hidden by a mask.
TILE_TOKENS = 128
SCALE_BYTES = 4
STATE_BYTES = 4
_LEAST_SNAPSHOTS = 8


def local_num_kv_heads(num_kv_heads: int, world_size: int) -> int:
    """KV heads that each rank holds, where ``K`` is their number and ``W`` the world size.

    ::

        K % W == 0   each rank holds K / W heads         K=4, W=2:  rank 0 [0 1]  rank 1 [2 3]
        W % K == 0   each head is held by W / K ranks    K=2, W=4:  rank 0 [0]  rank 1 [0]  rank 2 [1]  rank 3 [1]
    """
    return max(1, num_kv_heads // world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvKind:
    """What the layers of one group have in common.  ``window`` counts the visible keys, self included; None: all.
    ``num_kv_heads`` are the whole model's.  ``num_parts``: 2, keys and values; 1 where values are a part of the
    keys.  ``index_dim``: elements of a token's index key (``attention/selection.py``), 0 without; layers with and
    without one share a group.  ``rate``: tokens that one row stands for, which divides the size of a block."""

    window: int | None
    num_kv_heads: int
    head_dim: int
    num_parts: int = 2
    index_dim: int = 0
    rate: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """``layers`` in rising order; blocks wholly before ``window`` are given back, None keeps them all.  Each layer
    keeps ``num_parts`` (keys and values) of ``local_num_kv_heads`` heads, this rank's, of ``head_dim``, and those of
    ``index_layers`` an index key of ``index_dim``, after the keys and values of all."""

    layers: tuple[int, ...]
    window: int | None
    local_num_kv_heads: int
    head_dim: int
    num_parts: int = 2
    index_layers: tuple[int, ...] = ()
    index_dim: int = 0
    rate: int = 1

    def num_rows(self, block_size: int) -> int:
        """Rows of one part of a layer in a block."""
        return block_size // self.rate

    @property
    def width(self) -> int:
        """Elements of one part of a layer, keys or values, of one token."""
        return self.local_num_kv_heads * self.head_dim

    def kv_bytes(self, block_size: int, itemsize: int) -> int:
        """Bytes of the keys and values in a block of this group."""
        return self.num_parts * len(self.layers) * self.num_rows(block_size) * self.width * itemsize

    def value_bytes(self, block_size: int, itemsize: int) -> int:
        """Bytes of the keys and values, and of the index keys."""
        of_index = len(self.index_layers) * self.num_rows(block_size) * self.index_dim
        return self.kv_bytes(block_size, itemsize) + of_index * itemsize

    def kv_scale_bytes(self, block_size: int) -> int:
        """Bytes of the scales of quantised keys and values: one float32 per token, head, layer and part."""
        return self.num_parts * len(self.layers) * self.num_rows(block_size) * self.local_num_kv_heads * SCALE_BYTES

    def scale_bytes(self, block_size: int) -> int:
        """Bytes of all scales of a quantised block; an index key has one."""
        return self.kv_scale_bytes(block_size) + len(self.index_layers) * self.num_rows(block_size) * SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """The state of one layer, such as one with the gated delta rule (``kernels/gated_delta_net.py``); heads are the
    whole model's.  ``taps`` are those of its convolution, which keeps the ``taps - 1`` last inputs of each channel.
    With a ``key_dim`` of 0 it has no matrices, and the values are the channels.  If it ``is_repeated``, each rank has
    all of it."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    is_repeated: bool = False

    def on(self, world_size: int) -> StateKind:
        """Return one rank's part; key heads are repeated like KV heads."""
        if self.is_repeated:
            return self
        return replace(
            self,
            num_key_heads=local_num_kv_heads(self.num_key_heads, world_size),
            num_value_heads=self.num_value_heads // world_size,
        )

    @property
    def num_channels(self) -> int:
        """Elements of queries, keys and values, which go through the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_conv_elements(self) -> int:
        """Inputs that the convolution keeps."""
        return self.num_channels * (self.taps - 1)

    @property
    def num_elements(self) -> int:
        """Numbers of one row's state: the convolution's, and a matrix (key_dim, value_dim) for each value head."""
        return self.num_conv_elements + self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers with a recurrent state, by their number in the model, and this rank's part of each one's state."""

    kinds: tuple[tuple[int, StateKind], ...]

    @property
    def slot_elements(self) -> int:
        """float32 numbers of one row, in all layers."""
        return sum(kind.num_elements for _, kind in self.kinds)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one row's states."""
        return self.slot_elements * STATE_BYTES


def default_snapshots(max_num_seqs: int) -> int:
    """States that are kept for the prefix cache beside those of ``max_num_seqs`` rows."""
    return max(_LEAST_SNAPSHOTS, max_num_seqs // 2)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a model on one rank, those that keep all blocks first, and the state group if there is one."""

    groups: tuple[KvGroup, ...]
    states: StateGroup | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with K/V, in order."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each group's window."""
        return tuple(group.window for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same shape, so that blocks of all groups are read alike."""
        shapes = {(group.local_num_kv_heads, group.head_dim, group.num_parts, group.rate) for group in self.groups}
        return len(shapes) == 1

    @property
    def largest_rate(self) -> int:
        """Tokens that the row of a group stands for, at most; it divides the size of a block."""
        return max(group.rate for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """Whether there is one group, which keeps all of its blocks: as many as its tokens fill."""
        return self.windows == (None,)

    def block_bytes(self, block_size: int, itemsize: int, *, has_scales: bool = False) -> int:
        """Bytes of one block on one rank: of the largest group, with its padding.  A whole number of any group's
        tokens, so that kernels can count from block to block in tokens."""
        largest = max(
            group.value_bytes(block_size, itemsize) + (group.scale_bytes(block_size) if has_scales else 0)
            for group in self.groups
        )
        widths = [size for group in self.groups for size in (group.width, group.index_dim) if size]
        return largest if has_scales else round_up(largest, lcm(*widths) * itemsize)

    def blocks_for(self, num_tokens: int, block_size: int, chunk_tokens: int) -> int:
        """Return the most blocks of all groups that a sequence of up to ``num_tokens`` holds at once.  A group with a
        window holds the window, what kernels may read before it, the chunk of up to ``chunk_tokens`` that is computed,
        and one block more, because none of these need begin with a block."""
        whole = ceil_div(num_tokens, block_size)
        return sum(
            whole if window is None else min(whole, ceil_div(window + TILE_TOKENS + chunk_tokens, block_size) + 1)
            for window in self.windows
        )

    def place_of(self, layer: int) -> tuple[int, int]:
        """Return the group of a layer, and its place in the group's blocks."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise AssertionError(f"layer {layer} is in no group")


def lay_out(kinds: Sequence[KvKind | StateKind | None], world_size: int = 1, beside: KvKind | None = None) -> KvLayout:
    """Return the layout of a model on ``world_size`` ranks whose layer i is of ``kinds[i]``, at least one with K/V.
    None: the layer keeps nothing.  A layer that keeps more has further places after the layers.

    ``beside`` is one more layer, of a draft head: it joins the smallest group that it fits, if there is one, because it
    is no reason to cut the model's layers into other groups.

    All layers of the kind with the fewest elements make one group, and the other kinds are cut into groups of about as
    many elements, so that blocks have little unused room.  Blocks are larger where that would need more than
    ``MAX_GROUPS`` tables per row; if none does, layers of one shape make one group.
    """
    if beside is not None:
        return _with_layer(lay_out(kinds, world_size), len(kinds), beside, world_size) or lay_out(
            [*kinds, beside], world_size
        )
    layers_of: dict[KvKind, list[int]] = {}
    index_dims: dict[int, int] = {}
    states: list[tuple[int, StateKind]] = []
    for layer, kind in enumerate(kinds):
        if isinstance(kind, StateKind):
            states.append((layer, kind.on(world_size)))
        elif kind is not None:
            layers_of.setdefault(replace(kind, index_dim=0), []).append(layer)
            index_dims[layer] = kind.index_dim
    heads = {kind: local_num_kv_heads(kind.num_kv_heads, world_size) for kind in layers_of}
    widths = {kind: max(1, kind.num_parts * heads[kind] * kind.head_dim // kind.rate) for kind in layers_of}
    sizes = _group_sizes({kind: (len(layers), widths[kind]) for kind, layers in layers_of.items()})
    if sizes is None:
        layers_of = _merge_windows(layers_of)
        sizes = {kind: len(layers) for kind, layers in layers_of.items()}
    groups = []
    for own in sorted(layers_of, key=lambda one: (one.window is not None, one.window or 0, one.rate)):
        layers = layers_of[own]
        count = ceil_div(len(layers), sizes[own])
        for index in range(count):
            of_group = layers[index * len(layers) // count : (index + 1) * len(layers) // count]
            groups.append(
                KvGroup(
                    layers=tuple(of_group),
                    window=own.window,
                    local_num_kv_heads=local_num_kv_heads(own.num_kv_heads, world_size),
                    head_dim=own.head_dim,
                    num_parts=own.num_parts,
                    index_layers=tuple(layer for layer in of_group if index_dims[layer]),
                    index_dim=max(index_dims[layer] for layer in of_group),
                    rate=own.rate,
                )
            )
    return KvLayout(tuple(groups), StateGroup(tuple(states)) if states else None)


def _with_layer(layout: KvLayout, layer: int, kind: KvKind, world_size: int) -> KvLayout | None:
    """``layout`` with a ``layer`` of ``kind`` in the smallest group of its shape; None if there is no such group."""
    own = KvGroup(
        layers=(),
        window=kind.window,
        local_num_kv_heads=local_num_kv_heads(kind.num_kv_heads, world_size),
        head_dim=kind.head_dim,
        num_parts=kind.num_parts,
    )
    fitting = [group for group in layout.groups if replace(group, layers=(), index_layers=(), index_dim=0) == own]
    if not fitting:
        return None
    joined = min(fitting, key=lambda group: len(group.layers))
    larger = replace(joined, layers=(*joined.layers, layer))
    if kind.index_dim:
        larger = replace(larger, index_layers=(*joined.index_layers, layer), index_dim=kind.index_dim)
    return replace(layout, groups=tuple(larger if group is joined else group for group in layout.groups))


def _group_sizes(kinds: dict[KvKind, tuple[int, int]]) -> dict[KvKind, int] | None:
    """The most layers of each kind's groups, from its number of layers and their width: those of the smallest blocks
    that need no more than ``MAX_GROUPS`` groups.  None if all do."""
    least = min(count * width for count, width in kinds.values())
    rooms = {size * width for count, width in kinds.values() for size in range(1, count + 1)}
    for room in sorted(one for one in rooms if one >= least):
        sizes = {kind: room // width for kind, (_, width) in kinds.items()}
        if all(sizes.values()) and sum(ceil_div(kinds[kind][0], size) for kind, size in sizes.items()) <= MAX_GROUPS:
            return sizes
    return None


def _merge_windows(layers_of: dict[KvKind, list[int]]) -> dict[KvKind, list[int]]:
    """The layers of each shape as one kind, with a window only if all have the same."""
    found: dict[tuple[int, ...], list[KvKind]] = {}
    for kind in layers_of:
        found.setdefault((kind.num_kv_heads, kind.head_dim, kind.num_parts, kind.rate), []).append(kind)
    return {
        alike[0] if len(alike) == 1 else replace(alike[0], window=None): sorted(
            layer for kind in alike for layer in layers_of[kind]
        )
        for alike in found.values()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """What blocks of ``block_size`` tokens hold of requests of up to ``max_model_len`` tokens.  ``chunk_tokens``: the
    most tokens of a request that one step computes."""

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


@dataclass(slots=True)
class DiskCounters:
    """What has been read from and written to disk since the start: bytes, and the seconds that it took."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


def kv_cache_lines(*, num_bytes: int, num_tokens: int, max_model_len: int) -> tuple[str, str, str]:
    """Return the log lines that users look for: the cache in bytes, in tokens, and in requests of the greatest length.
    Bytes are one rank's."""
    return (
        f"Available KV cache memory: {format_gib(num_bytes)}",
        f"GPU KV cache size: {num_tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {num_tokens / max_model_len:.2f}x",
    )
