"""Which of a row's blocks each group of layers still needs: all of them, or those that its window may still read.

A row computes tokens from ``position`` on.  In a group with a window its first query sees ``window`` keys, itself
included, and kernels begin at the start of a tile before the first of them::

    tokens    | . . . . | . . . . | t t t k | k k k k | k k q . |        window 8, blocks and tiles of 4
    blocks      0         1         2     ^     3         4   ^ position 18
                                    ^     first key 11
                                    first_needed: blocks 0 and 1 may be given back

A row never needs again what it gave back, because positions only grow.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tp_engine.plan import BoolArray
from tp_engine.system.units import ceil_div

Counts: TypeAlias = npt.NDArray[np.int64]
_Int = TypeVar("_Int", bound=np.integer[Any])

_ENDLESS = 1 << 62


class KvWindows:
    """The rules of a model's groups.  ``windows`` (G,): visible keys, self included, None for a group that keeps all.
    ``is_full`` (G,) bool says which groups keep all blocks, ``has_full`` and ``has_windows`` whether the model has
    groups of either kind."""

    def __init__(self, windows: Sequence[int | None], block_size: int, tile_tokens: int) -> None:
        self.num_groups = len(windows)
        self.is_full: BoolArray = np.array([window is None for window in windows])
        self.has_full = bool(self.is_full.any())
        self.has_windows = not self.is_full.all()
        self._block_size, self._tile_tokens = block_size, tile_tokens
        self._keys_before: Counts = np.array([_ENDLESS if window is None else window - 1 for window in windows])

    def first_needed(self, positions: Counts | int) -> Counts:
        """Return the first block of each group that a row needs whose next token is at ``positions`` (n,): (n, G)."""
        first_keys = np.maximum(np.asarray(positions)[..., None] - self._keys_before, 0)
        first: Counts = first_keys // self._tile_tokens * self._tile_tokens // self._block_size
        return first

    def held(self, table: npt.NDArray[_Int], first: Counts) -> npt.NDArray[_Int]:
        """Return the entries of ``table`` (n, G) from the blocks ``first`` (G,) on, logical block by logical block."""
        if not self.has_windows:
            return table.reshape(-1)
        return table[np.arange(len(table))[:, None] >= first]

    def longest_hit(self, is_there: BoolArray) -> int:
        """Return how many of the logical blocks ``is_there`` (n, G) a sequence can begin with, at most: of a group with
        a window it needs the last ones only."""
        numbers = np.arange(len(is_there) + 1)
        unbroken_from = np.zeros((len(numbers), self.num_groups), dtype=np.int64)
        behind_gap = np.where(is_there, 0, numbers[1:, None])
        np.maximum.accumulate(behind_gap, axis=0, out=unbroken_from[1:])
        suffices = (unbroken_from <= self.first_needed(numbers * self._block_size)).all(axis=1)
        return int(np.flatnonzero(suffices)[-1])

    def most_blocks(self, num_logical: int, chunk_tokens: int) -> int:
        """Return the most blocks of the pool that a sequence of ``num_logical`` blocks ever holds, computed in chunks
        of at most ``chunk_tokens``: all of them in full groups; in the others those that the window, the tile before it
        and a chunk may touch."""
        total = 0
        for is_full, keys_before in zip(self.is_full.tolist(), self._keys_before.tolist(), strict=True):
            touched = keys_before + self._tile_tokens - 1 + chunk_tokens
            total += num_logical if is_full else min(num_logical, ceil_div(touched - 1, self._block_size) + 1)
        return total
