"""Random weights: the same model for the same seed, for every world size and device.

One pool of random numbers is drawn.  A tensor is the pool repeated, from an offset that its name decides; the pool's
size is prime, so rows do not repeat.  A rank can thus copy any part of any tensor without drawing the rest::

    pool      [ 0 1 2 3 4 | 0 1 2 3 4 | ...        held twice, so that a stretch of up to one pool is one slice
    tensor            [ 3 4 0 | 1 2 3 | ... ]      rows of 3, starting at 3
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from tp_engine.weights.source import Source, Spans

POOL_SIZE = 4_194_301
# Uniform numbers are quick to draw; models are usually initialised with this standard deviation, 0.02.
HALF_WIDTH = 0.02 * math.sqrt(3.0)
_MIXER = 0x9E3779B1  # odd, as in multiplicative hashing: it spreads a number's high bits over its low ones


class DummyWeights:
    """The values that ``sources`` take, without a checkpoint.

    Sources with an ``init`` are constant; other floats are uniform with mean 0 and standard deviation 0.02, integers
    uniform over all their values, and float8 over -1 to 1.
    """

    def __init__(self, sources: Iterable[Source], seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._sources, self._seed, self._dtype = {source.name: source for source in sources}, seed, dtype
        pool = torch.empty(POOL_SIZE, dtype=torch.float32, device="cpu").uniform_(
            -HALF_WIDTH, HALF_WIDTH, generator=torch.Generator().manual_seed(seed)
        )
        self._pool = torch.cat((pool, pool)).to(device=device, dtype=dtype)

    def __enter__(self) -> DummyWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def names(self) -> set[str]:
        """Exactly the tensors that the model needs."""
        return set(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that the source asks for, or the model's."""
        return self._sources[name].dtype or self._dtype

    def read(self, name: str, source: Source) -> torch.Tensor:
        """Return the values that ``source`` takes, on the device."""
        dtype = self.dtype(name)
        if source.init is not None:
            return self._pool.new_full([span.size for span in source.taken], source.init).to(dtype)
        values = self._read(self._offset(name), source.shape, source.taken)
        if dtype is self._dtype:
            return values
        unit = values.float() / HALF_WIDTH
        if dtype.is_floating_point:
            return unit.to(dtype)
        bits = (unit * 2.0**30).to(torch.int64) * _MIXER
        return (bits >> 8).to(dtype)  # the bits beyond the type's are dropped

    def _read(self, offset: int, shape: tuple[int, ...], taken: Spans) -> torch.Tensor:
        """Elements ``taken`` of a tensor of ``shape`` whose first is at ``offset`` of the repeated pool."""
        (first, count), *rest = taken
        row_size = math.prod(shape[1:])
        if row_size > POOL_SIZE:
            rows = (self._read(offset + row * row_size, shape[1:], taken[1:]) for row in range(first, first + count))
            return torch.stack(list(rows))
        rows_per_stretch = POOL_SIZE // row_size
        stretches = []
        for row in range(first, first + count, rows_per_stretch):
            num_rows = min(rows_per_stretch, first + count - row)
            begin = (offset + row * row_size) % POOL_SIZE
            values = self._pool[begin : begin + num_rows * row_size].view(num_rows, *shape[1:])
            for dim, span in enumerate(rest, start=1):
                values = values.narrow(dim, span.start, span.size)
            stretches.append(values)
        return torch.cat(stretches)

    def _offset(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % POOL_SIZE
