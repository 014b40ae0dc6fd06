"""What one attention call gathers: the requests that share it, where their keys lie, and the keys themselves.

The groups follow from lengths alone, on the host, once per step.  Requests share a call if their query lengths are
equal (all decodes: 1) and their contexts are of similar length, because every request of a call gathers as many keys as
the longest one.  A long query gets its own call.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, states_at
from tp_engine.plan import IntArray

# Longest query that is batched: a longer one is enough work to hide the cost of its own call.
MAX_BATCHED_QUERY = 32
# One more call costs about as much as gathering and attending over this many tokens (measured on CPUs).
CALL_COST_TOKENS = 512
# Bounds the copies of one call (rows times longest context, for more than one row); on CPUs the fastest size measured.
MAX_CALL_TOKENS = {"cpu": 4096, "cuda": 16384}
# Contexts of one call differ by less than this factor (until small calls are merged).
_LENGTH_RATIO = 2.0**0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGroup:
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


def group_requests(query_lens: IntArray, seq_lens: IntArray, max_call_tokens: int) -> list[QueryGroup]:
    """Groups that cover every request with a query and a context; padding requests are left out.

    ``query_lens`` and ``seq_lens`` (B,) int32; ``max_call_tokens`` as in ``MAX_CALL_TOKENS``.
    """
    if _is_one_call_of_decodes(query_lens, seq_lens, max_call_tokens):
        rows = np.arange(len(query_lens), dtype=np.int32)
        return [QueryGroup(rows=rows, starts=rows, seq_lens=seq_lens, query_len=1)]
    starts = np.cumsum(query_lens, dtype=np.int32) - query_lens
    active = np.flatnonzero((seq_lens > 0) & (query_lens > 0)).astype(np.int32)
    groups: list[QueryGroup] = []
    for query_len in np.unique(query_lens[active]).tolist():
        rows = active[query_lens[active] == query_len]
        groups.extend(
            QueryGroup(rows=members, starts=starts[members], seq_lens=seq_lens[members], query_len=query_len)
            for members in _split(rows, seq_lens[rows], query_len, max_call_tokens)
        )
    return groups


def _is_one_call_of_decodes(query_lens: IntArray, seq_lens: IntArray, max_call_tokens: int) -> bool:
    """Whether the general rule gives one group of all requests, with one query each: the usual small step."""
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
    """A label (B,) per request: lengths within one ratio share it, and buckets too small for a call are merged."""
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


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys that a group's calls read: ``num_keys`` positions of each request b, from ``first[b]`` (B,) on.

    They may begin before the first visible key (at its block's start) and end after the request's end.  After the end
    they repeat the first key, because another request's memory may hold NaN, which passes through a mask.  A mask must
    hide both, unless ``is_exact``.

    ``rows`` (B x num_keys,) int64: where they lie (``row_ids``).
    """

    first: IntArray
    num_keys: int
    is_exact: bool
    rows: torch.Tensor


def visible_keys(
    group: QueryGroup, window: int | None, metadata: AttentionMetadata, block_size: int, rows_per_block: int
) -> VisibleKeys:
    """Return the keys that ``group`` reads in every layer of this ``window``; ``rows_per_block`` as ``row_ids`` takes
    it."""
    first = np.zeros_like(group.seq_lens)
    if window is not None:
        np.maximum(group.seq_lens - group.query_len - window + 1, 0, out=first)
    aligned = first // block_size * block_size
    counts = group.seq_lens - aligned
    num_keys = int(counts.max())
    is_exact = bool((counts == num_keys).all() and (aligned == first).all())
    rows = row_ids(group, aligned, counts, metadata.block_table, block_size, rows_per_block)
    return VisibleKeys(aligned, num_keys, is_exact, rows)


def row_ids(
    group: QueryGroup,
    first: IntArray,
    counts: IntArray,
    block_table: torch.Tensor,
    block_size: int,
    rows_per_block: int,
) -> torch.Tensor:
    """Rows (B x longest count,) int64 of ``counts[b]`` positions from ``first[b]`` on, where a block begins.

    They are rows of ``LayerKv.token_rows``, or with ``block_size`` rows per block slots, for a quantised cache.
    """
    device, num_keys = block_table.device, int(counts.max())
    num_blocks = -(-num_keys // block_size)
    tables = block_table.index_select(0, torch.from_numpy(group.rows).to(device))
    if first.any():
        columns = first[:, np.newaxis].astype(np.int64) // block_size + np.arange(num_blocks)
        columns = np.minimum(columns, tables.shape[1] - 1)  # beyond a request's end
        tables = tables.gather(1, torch.from_numpy(columns).to(device))
    starts = tables[:, :num_blocks, None].long() * rows_per_block
    rows = (starts + torch.arange(block_size, device=device)).flatten(1)[:, :num_keys]
    if (counts < num_keys).any():
        count = torch.from_numpy(counts).to(device)[:, None]
        own = torch.arange(num_keys, dtype=torch.int32, device=device) < count
        rows = torch.where(own, rows, rows[:, :1])
    return rows.flatten()


class RowReader:
    """Copies cached keys and values into a buffer that every call reuses: new memory would cost page faults.

    The next ``read`` of the same ``part`` overwrites what ``read`` returned.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def read(self, kv: LayerKv, part: int, rows: torch.Tensor) -> torch.Tensor:
        """Keys (part 0) or values (part 1) at ``rows`` (``row_ids``): (keys, KV heads, head_dim).

        A quantised cache is read as float32.
        """
        if kv.scales is not None:
            return states_at(kv, part, rows)
        _, _, _, num_kv_heads, head_dim = kv.cache.shape
        tokens = kv.token_rows[part]
        found = self._buffer(part, len(rows) * tokens.shape[1], tokens).view(len(rows), -1)
        torch.index_select(tokens, 0, rows, out=found)
        return found.view(-1, num_kv_heads, head_dim)

    def _buffer(self, part: int, size: int, like: torch.Tensor) -> torch.Tensor:
        """The first ``size`` elements of the part's buffer, which grows as needed."""
        key = (part, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # else it could only be written in inference mode
                buffer = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size]
