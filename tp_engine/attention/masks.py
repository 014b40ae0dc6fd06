"""Additive attention masks: 0 where a key is visible, -inf where it is not.

Key position j is visible to query position i iff ``j <= i``, and ``i - window < j`` where there is a sliding window.
"""

from __future__ import annotations

import numpy as np
import torch

from tp_engine.plan import IntArray

_HIDDEN = float("-inf")


def batched_mask(
    own_key: IntArray, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Mask (B, queries, num_keys).  ``own_key`` (B, queries): which of its request's keys is at a query's position."""
    last = torch.from_numpy(own_key).to(device)[:, :, None]
    key = torch.arange(num_keys, dtype=torch.int32, device=device)
    visible = key <= last
    if window is not None:
        visible &= key > last - window
    return torch.where(visible, torch.zeros((), dtype=dtype, device=device), _HIDDEN)


class StaircaseMasks:
    """Masks of queries that are the last positions of their keys, all cut from one table per window and dtype.

    Such a mask depends on ``j - i`` alone, so those of t queries over n keys are the table's lower right corner::

                 n keys
        . . . . 0 0 0 -        . visible in the table, outside this corner
        . . . . 0 0 0 0  t     0 visible   - hidden
    """

    def __init__(self, max_queries: int) -> None:
        self._max_queries = max_queries
        self._tables: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}

    def corner(
        self, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Mask (num_queries, num_keys); at most ``max_queries`` queries, and at least as many keys."""
        table = self._tables.get((window, dtype, device))
        if table is None or table.shape[1] < num_keys:
            table = self._build(max(num_keys, self._max_queries), window, dtype, device)
            self._tables[window, dtype, device] = table
        return table[self._max_queries - num_queries :, table.shape[1] - num_keys :]

    def _build(self, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The table for up to twice ``num_keys`` keys, so that a growing context seldom needs a new one."""
        capacity = 2 * num_keys
        own_key = np.arange(capacity - self._max_queries, capacity, dtype=np.int32)
        return batched_mask(own_key[np.newaxis], capacity, window, dtype, device)[0]
