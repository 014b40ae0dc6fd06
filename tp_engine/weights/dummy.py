"""Random weights that are the same model for every seed, whatever the world size and the device.

A tensor is a sequence of chunks of whole rows.  Each chunk has a generator of its own, seeded by the tensor's name and
the chunk's number, so that a rank draws no more chunks than its rows touch::

    rows   0 ..... 99 | 100 .... 199 | 200 .... 299         rank 1 of 2 holds rows 150 .. 299:
           chunk 0    | chunk 1      | chunk 2              it draws chunks 1 and 2
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from tp_engine.weights.shard import Shard

CHUNK_ELEMENTS = 1 << 22
# Uniform numbers, which are quick to draw, with the standard deviation at which models are usually initialised.
HALF_WIDTH = 0.02 * math.sqrt(3.0)


class DummyWeights:
    """Norm weights are 1; everything else is uniform with mean 0 and standard deviation 0.02."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes, self._seed, self._dtype, self._device = shapes, seed, dtype, device

    def __enter__(self) -> DummyWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def names(self) -> set[str]:
        """Exactly the tensors that the model wants."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._shapes[name]

    def read(self, name: str, shard: Shard) -> torch.Tensor:
        """The shard, on the device."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shard.size, dtype=self._dtype, device=self._device)
        first, last = (shard.start, shard.start + shard.size) if shard.dim == 0 else (0, shape[0])
        result = torch.empty(last - first, *_narrowed(shape[1:], shard), dtype=self._dtype, device=self._device)
        rows_per_chunk = max(1, CHUNK_ELEMENTS // math.prod(shape[1:]))
        for chunk in range(first // rows_per_chunk, -(-last // rows_per_chunk)):
            begin, end = chunk * rows_per_chunk, min((chunk + 1) * rows_per_chunk, shape[0])
            wanted = slice(max(first, begin), min(last, end))
            values = self._draw(name, chunk, (end - begin, *shape[1:]))[wanted.start - begin : wanted.stop - begin]
            if shard.dim == 1:
                values = values.narrow(1, shard.start, shard.size)
            result[wanted.start - first : wanted.stop - first] = values
        return result

    def _draw(self, name: str, chunk: int, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{chunk}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(shape).uniform_(-HALF_WIDTH, HALF_WIDTH, generator=generator)


def _narrowed(shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """The dimensions after the first, as the shard has them."""
    return (shard.size,) if shard.dim == 1 else shape
