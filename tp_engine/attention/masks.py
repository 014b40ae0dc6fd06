"""Additive attention masks: 0 where a key is visible, -inf where it is not.

Key position j is visible to query position i iff ``j <= i``, and ``i - window < j`` where there is a sliding window.
"""

from __future__ import annotations

import torch

_HIDDEN = float("-inf")


def batched_mask(
    first: torch.Tensor, seq_lens: torch.Tensor, query_len: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Mask (B, query_len, num_keys): request b's queries are its last positions, its keys start at ``first[b]``.

    ``first`` and ``seq_lens`` (B,) integers.  Keys beyond a request's end are hidden.
    """
    device = first.device
    key = (first[:, None] + torch.arange(num_keys, device=device))[:, None, :]
    query = (seq_lens[:, None] - query_len + torch.arange(query_len, device=device))[:, :, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, _HIDDEN)


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
        ends = torch.tensor([capacity], device=device)
        return batched_mask(torch.zeros_like(ends), ends, self._max_queries, capacity, window, dtype)[0]
