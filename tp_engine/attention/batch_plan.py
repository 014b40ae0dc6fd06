"""Which requests of a step share one attention call.  Host only: from lengths, once per step.

Requests share a call when their query lengths are equal (all decodes: 1) and their contexts are of similar length, as
every request of a call gathers as many keys as the longest one.  A long query is worth a call of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tp_engine.plan import IntArray

# Longest query that is batched: beyond it a call has enough work to hide its own cost.
MAX_BATCHED_QUERY = 32
# One more call costs about as much as gathering and attending over this many tokens (measured on CPUs).
CALL_COST_TOKENS = 512
# Bounds the copies of one call (rows times longest context, for more than one row); on CPUs the fastest size measured.
MAX_CALL_TOKENS = {"cpu": 4096, "cuda": 16384}
# Contexts of one call differ by less than this factor (until small calls are merged).
_LENGTH_RATIO = 2.0**0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Requests ``rows`` (B,) of the step's batch, ascending; request i's queries are the ``query_len`` tokens from
    ``starts[i]`` (B,) on, the last of ``seq_lens[i]`` (B,) tokens."""

    rows: IntArray
    starts: IntArray
    seq_lens: IntArray
    query_len: int

    @property
    def is_consecutive(self) -> bool:
        """Whether the queries are one range of the step's tokens."""
        span = int(self.starts[-1]) - int(self.starts[0])
        return span == (len(self.rows) - 1) * self.query_len


def plan_groups(query_lens: IntArray, seq_lens: IntArray, max_call_tokens: int) -> list[Group]:
    """Groups that cover every request with a query and a context; padding requests are in none.

    ``query_lens`` and ``seq_lens`` (B,) int32; ``max_call_tokens`` as in ``MAX_CALL_TOKENS``.
    """
    if _is_one_call_of_decodes(query_lens, seq_lens, max_call_tokens):
        rows = np.arange(len(query_lens), dtype=np.int32)
        return [Group(rows=rows, starts=rows, seq_lens=seq_lens, query_len=1)]
    starts = np.cumsum(query_lens, dtype=np.int32) - query_lens
    active = np.flatnonzero((seq_lens > 0) & (query_lens > 0)).astype(np.int32)
    groups: list[Group] = []
    for query_len in np.unique(query_lens[active]).tolist():
        rows = active[query_lens[active] == query_len]
        groups.extend(
            Group(rows=members, starts=starts[members], seq_lens=seq_lens[members], query_len=query_len)
            for members in _split(rows, seq_lens[rows], query_len, max_call_tokens)
        )
    return groups


def _is_one_call_of_decodes(query_lens: IntArray, seq_lens: IntArray, max_call_tokens: int) -> bool:
    """Whether the general way would end in one group of all requests, each with one query: the usual small step."""
    num_requests = len(query_lens)
    if not num_requests or query_lens.max() != 1 or query_lens.min() != 1:
        return False
    longest, shortest = int(seq_lens.max()), int(seq_lens.min())
    is_small = num_requests == 1 or num_requests * longest <= max_call_tokens
    return shortest > 0 and is_small and num_requests * (longest - shortest) <= CALL_COST_TOKENS


def _split(rows: IntArray, seq_lens: IntArray, query_len: int, max_call_tokens: int) -> Iterator[IntArray]:
    """``rows`` of equal query length, in groups of similar context."""
    if query_len > MAX_BATCHED_QUERY:
        yield from rows[:, np.newaxis]
        return
    bucket = _length_buckets(seq_lens)
    for label in np.unique(bucket).tolist():
        members = bucket == label
        rows_per_call = max(1, max_call_tokens // int(seq_lens[members].max()))
        similar = rows[members]
        yield from np.array_split(similar, -(-len(similar) // rows_per_call))


def _length_buckets(seq_lens: IntArray) -> IntArray:
    """A label (B,) per request: lengths within one ratio are together, and so are buckets not worth a call."""
    longest = int(seq_lens.max())
    if len(seq_lens) * longest - int(seq_lens.sum(dtype=np.int64)) <= CALL_COST_TOKENS:
        return np.zeros(len(seq_lens), dtype=np.int32)
    labels: IntArray = (np.log(longest / seq_lens) / np.log(_LENGTH_RATIO)).astype(np.int32)
    kept, kept_max = 0, longest
    for label in np.unique(labels).tolist():
        members = labels == label
        own_max = int(seq_lens[members].max())
        if int(members.sum()) * (kept_max - own_max) > CALL_COST_TOKENS:
            kept, kept_max = label, own_max
        else:
            labels[members] = kept
    return labels
