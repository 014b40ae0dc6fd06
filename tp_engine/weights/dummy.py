"""Random weights: the same model for the same seed, whatever the world size and the device.

One pool of random numbers is drawn.  A tensor is the pool repeated, from a place that its name decides; a prime number
of them keeps rows from repeating.  So every rank can copy any part of any tensor without drawing the rest::

    pool      [ 0 1 2 3 4 | 0 1 2 3 4 | ...        held twice, so that a stretch of up to one pool is one slice
    tensor            [ 3 4 0 | 1 2 3 | ... ]      rows of 3, starting at 3
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from tp_engine.weights.shard import Shard

POOL_SIZE = 4_194_301
# Uniform numbers, which are quick to draw, with the standard deviation at which models are usually initialised.
HALF_WIDTH = 0.02 * math.sqrt(3.0)


class DummyWeights:
    """Norm weights are 1; everything else is uniform with mean 0 and standard deviation 0.02."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes, self._seed = shapes, seed
        pool = torch.empty(POOL_SIZE).uniform_(-HALF_WIDTH, HALF_WIDTH, generator=torch.Generator().manual_seed(seed))
        self._pool = torch.cat((pool, pool)).to(device=device, dtype=dtype)

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
        if name.endswith("norm.weight"):
            return self._pool.new_ones(shard.size)
        num_rows, *rest = self._shapes[name]
        row_size = math.prod(rest)
        assert row_size <= POOL_SIZE, f"{name} has rows of {row_size} elements"
        first, last = (shard.start, shard.start + shard.size) if shard.dim == 0 else (0, num_rows)
        rows_per_stretch = POOL_SIZE // row_size
        stretches = []
        for row in range(first, last, rows_per_stretch):
            count = min(rows_per_stretch, last - row)
            begin = (self._offset(name) + row * row_size) % POOL_SIZE
            values = self._pool[begin : begin + count * row_size].view(count, *rest)
            stretches.append(values.narrow(1, shard.start, shard.size) if shard.dim == 1 else values)
        return torch.cat(stretches)

    def _offset(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % POOL_SIZE
