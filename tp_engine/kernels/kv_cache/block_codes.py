"""Whole KV blocks in 8 bits, for the tiers below the pool: the format and its formulas in plain PyTorch.

::

    block   (parts, vectors of a part, head_dim)      part 2 i: keys, part 2 i + 1: values of the layer at place i
    blob    codes (vectors, head_dim) int8 or e4m3 | scales (vectors,) bfloat16        vectors: of all parts

    element = code * scale        scale: the vector's largest magnitude / the type's largest value, rounded up

A vector is one head of one token, so K/V that come back depend on that token alone.  Scales have two bytes, so that a
blob is little more than half of a block of two-byte elements; because they are rounded up, no element saturates.  A
vector whose scale is below the smallest normal number becomes zeros; one with an element that is not finite, NaN.

Vectors have the order in which they lie in the block.  Keys in the order of ``cpu/attention_types.h`` are columns::

    rows      (block_size, KV heads, head_dim)
    columns   (KV heads, block_size / simd_width, items of 4 bytes, simd_width)
    values    (KV heads, block_size, head_dim)      beside keys in columns
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE
from tp_engine.plan import IntArray

Pairs: TypeAlias = IntArray | torch.Tensor
"""(n, 2) int32: on the host, or on the pool's device."""

SCALE_BYTES = 2
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """What a block consists of; ``num_parts`` is twice its layers, ``simd_width`` 0 where keys are rows."""

    num_parts: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    simd_width: int = 0

    @property
    def part_vectors(self) -> int:
        """Vectors of a part."""
        return self.block_size * self.num_kv_heads

    @property
    def num_vectors(self) -> int:
        """Vectors of all parts, an even number."""
        return self.num_parts * self.part_vectors

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_vectors * self.head_dim * self.dtype.itemsize

    @property
    def code_bytes(self) -> int:
        """Bytes of a blob's codes."""
        return self.num_vectors * self.head_dim

    @property
    def blob_bytes(self) -> int:
        """Bytes of a blob."""
        return self.code_bytes + self.num_vectors * SCALE_BYTES

    def vectors_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """``blocks`` (n, block_bytes) uint8 as vectors (n, parts, vectors of a part, head_dim)."""
        if not self.simd_width:
            return blocks.view(self.dtype).view(len(blocks), self.num_parts, self.part_vectors, self.head_dim)
        return self._exchanged(blocks, self._columns, self._rows)

    def blocks_of(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse of ``vectors_of``."""
        blocks = vectors.contiguous().view(len(vectors), -1).view(torch.uint8)
        if not self.simd_width:
            return blocks
        return self._exchanged(blocks, self._rows, self._columns).view(len(vectors), -1).view(torch.uint8)

    @property
    def _columns(self) -> tuple[int, ...]:
        """Groups of keys as they lie in the block, in bytes."""
        return (self.part_vectors // self.simd_width, self.head_dim * self.dtype.itemsize // 4, self.simd_width, 4)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The same groups as vectors."""
        groups, items, simd_width, _ = self._columns
        return (groups, simd_width, items, 4)

    def _exchanged(self, blocks: torch.Tensor, given: tuple[int, ...], wanted: tuple[int, ...]) -> torch.Tensor:
        """``blocks``, whose keys are reordered from the shape ``given`` to ``wanted``, as vectors."""
        parts = blocks.clone().view(len(blocks), self.num_parts // 2, 2, math.prod(given))
        keys = parts[:, :, 0].view(len(blocks), -1, *given).transpose(3, 4)
        assert keys.shape[2:] == wanted, (given, wanted)
        parts[:, :, 0] = keys.flatten(2)
        return parts.view(self.dtype).view(len(blocks), self.num_parts, self.part_vectors, self.head_dim)


def encode_blocks(pool: torch.Tensor, blobs: torch.Tensor, pairs: Pairs, form: BlockForm, codes: torch.dtype) -> None:
    """Encode blocks: ``pairs`` (n, 2) are a block of ``pool`` and its place in ``blobs``, all places different.

    ``pool`` (blocks, block_bytes) and ``blobs`` (m, blob_bytes) uint8; ``codes`` int8 or float8_e4m3fn.
    """
    from_ids, to_ids = pair_ids(pairs, pool.device)
    values, scales = quantise(form.vectors_of(pool[from_ids]).float(), codes)
    parts = [part.view(len(pairs), -1).view(torch.uint8) for part in (values, scales)]
    blobs[to_ids] = torch.cat(parts, 1)


def decode_blocks(blobs: torch.Tensor, pool: torch.Tensor, pairs: Pairs, form: BlockForm, codes: torch.dtype) -> None:
    """Decode blobs: ``pairs`` (n, 2) are a place in ``blobs`` and a block of ``pool``, all blocks different."""
    from_ids, to_ids = pair_ids(pairs, pool.device)
    given = blobs[from_ids]
    values = given[:, : form.code_bytes].contiguous().view(codes).float()
    scales = given[:, form.code_bytes :].contiguous().view(torch.bfloat16).float()
    vectors = values.view(len(pairs), form.num_parts, form.part_vectors, form.head_dim)
    states = vectors * scales.view(*vectors.shape[:-1], 1)
    pool[to_ids] = form.blocks_of(states.to(form.dtype))


def quantise(states: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``states`` (..., head_dim) float32 as values (..., head_dim) of ``codes`` and scales (...) bfloat16."""
    largest = LARGEST_VALUE[codes]
    scales = round_up(states.abs().amax(-1) / largest)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    scaled = states * inverse.unsqueeze(-1)
    values = scaled.round_().to(codes) if codes == torch.int8 else scaled.to(codes)
    return values, scales.bfloat16()


def round_up(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` float32, at least 0, rounded up to bfloat16; 0 below the smallest normal number, NaN if not finite."""
    bits = (scales.view(torch.int32) + 0xFFFF) & -0x10000
    rounded = torch.where(scales < _SMALLEST_SCALE, 0.0, bits.view(torch.float32))
    return torch.where(scales.isfinite(), rounded, torch.nan)


def pair_ids(pairs: Pairs, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The two columns of ``pairs`` as int64 on ``device``."""
    on_device = pairs if isinstance(pairs, torch.Tensor) else torch.from_numpy(pairs).to(device)
    return on_device.long().unbind(1)
