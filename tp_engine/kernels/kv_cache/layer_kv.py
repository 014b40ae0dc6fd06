"""One layer's keys and values in the paged cache: its layout, its 8-bit form, and the store, in plain PyTorch.

::

    cache    (parts, blocks, block_size, KV heads, head_dim)   keys at 0, values at 1
    scales   (parts, blocks, KV heads, block_size) float32     only of a quantised cache, which is int8 or float8_e4m3fn

    element = cache[part, block, offset, head, d] * scales[part, block, head, offset]

Latent attention keeps one part: its values are the first elements of its keys (``attention/mla.py``).

Both are views of a pool whose blocks hold all layers of a group (worker/memory/kv_cache.py): a block's keys are
contiguous, its values too, and ``block_stride`` elements lie between one block and the next.

The scale of a head's vector is its largest magnitude over the type's largest value, so nothing saturates and a token's
K/V depends on that token alone.  Offsets are the scales' last dimension because kernels read a block's scales together.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

SCALE_DTYPE = torch.float32
# The largest value of each quantised type.
LARGEST_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KeyValue(NamedTuple):
    """A step's new keys and values of one layer, each (N, KV heads, head_dim); of a cache with one part, values are
    the first elements of the keys."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerKv:
    """One layer's paged cache; see the module's text for the shapes.

    ``token_rows``: keys and values as rows (n, KV heads x head_dim), those of a token at ``block * rows_per_block +
    offset``.  The rows between belong to other layers.  A quantised cache, with scales between its blocks, has none.
    """

    cache: torch.Tensor
    scales: torch.Tensor | None = None
    token_rows: tuple[torch.Tensor, ...] = field(init=False)
    rows_per_block: int = field(init=False)

    def __post_init__(self) -> None:
        for tensor in (self.cache, self.scales):
            assert tensor is None or tensor[:1, :1].is_contiguous(), (tensor.shape, tensor.stride())
        _, num_blocks, block_size, num_kv_heads, head_dim = self.cache.shape
        width = num_kv_heads * head_dim
        rows_per_block, rest = divmod(self.block_stride, width)
        assert self.scales is not None or rest == 0, (self.cache.shape, self.block_stride)
        sizes = ((num_blocks - 1) * rows_per_block + block_size, width)
        rows = () if self.scales is not None else (part.as_strided(sizes, (width, 1)) for part in self.cache.unbind())
        object.__setattr__(self, "token_rows", tuple(rows))
        object.__setattr__(self, "rows_per_block", rows_per_block)

    @property
    def block_stride(self) -> int:
        """Elements of ``cache`` from one block's keys to the next block's."""
        return self.cache.stride(1)

    @property
    def scale_stride(self) -> int:
        """The same for ``scales``; 0 if there are none."""
        return 0 if self.scales is None else self.scales.stride(1)


def layer_view(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """The layer at ``place`` of ``blocks`` (blocks, layers, parts, ...) as (parts, blocks, ...), without a copy."""
    return blocks[:, place].transpose(0, 1)


def store_kv(new: KeyValue, kv: LayerKv, slot_mapping: torch.Tensor) -> None:
    """Store token i's key and value at slot ``slot_mapping[i]``; a negative slot is skipped.

    ``new``, of any float dtype, (N, KV heads, head_dim) each; ``slot_mapping`` (N,) int64, without repeated slots.
    """
    kept = tokens_to_store(slot_mapping)
    if kept is None:
        scatter_kv(new, kv, slot_mapping)
    else:
        scatter_kv(KeyValue(new.key[kept], new.value[kept]), kv, slot_mapping[kept])


def tokens_to_store(slot_mapping: torch.Tensor) -> torch.Tensor | None:
    """Indices of the tokens that are not padding, or None if there is no padding.  Waits for the device."""
    stored = slot_mapping >= 0
    return None if bool(stored.all()) else stored.nonzero().squeeze(1)


def scatter_kv(new: KeyValue, kv: LayerKv, slots: torch.Tensor) -> None:
    """``store_kv`` for slots (N,) int64 without padding."""
    block_size = kv.cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    if kv.scales is None:
        rows = blocks * kv.rows_per_block + offsets
        for cached, states in zip(kv.token_rows, new, strict=False):  # a cache may have keys alone
            cached.index_copy_(0, rows, states.flatten(1).to(cached.dtype))
        return
    for part, states in enumerate(new[: len(kv.cache)]):
        values, scales = quantise(states, kv.cache.dtype)
        # As bytes, because 8-bit floats cannot be indexed.
        kv.cache[part].view(torch.uint8)[blocks, offsets] = values.view(torch.uint8)
        kv.scales[part][blocks, :, offsets] = scales


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of ``dtype`` has scales beside it."""
    return dtype in LARGEST_VALUE


def quantise(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``states`` (..., head_dim) as values (..., head_dim) of ``dtype`` and scales (...) float32.

    Rounds to the nearest, ties to even.  A vector of zeros has scale 0.
    """
    exact = states.float()
    largest = LARGEST_VALUE[dtype]
    peak = exact.abs().amax(-1)
    inverse = torch.where(peak > 0, largest / peak, 0.0)
    scaled = (exact * inverse.unsqueeze(-1)).clamp_(-largest, largest)
    values = scaled.round_().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return values, peak / largest


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values (..., head_dim) and scales (...) -> states (..., head_dim) float32."""
    return values.float() * scales.unsqueeze(-1)


def states_at(kv: LayerKv, part: int, slots: torch.Tensor) -> torch.Tensor:
    """Keys or values (n, KV heads, head_dim) at ``slots`` (n,) int64, float32 from a quantised cache."""
    block_size = kv.cache.shape[2]
    place = slots // block_size, slots % block_size
    states = kv.cache[part]
    if kv.scales is None:
        return states[place]
    # As bytes, because 8-bit floats cannot be indexed.
    return dequantise(states.view(torch.uint8)[place].view(states.dtype), kv.scales[part][place[0], :, place[1]])
