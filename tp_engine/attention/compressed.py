"""Attention to the rows of a window, and to entries that stand for older tokens, in one softmax, in plain PyTorch.

``model_config/compression.py`` has the mechanism.  A query at position p sees the rows of the last ``window`` tokens,
its own included, and of the entries the first (p + 1) / rate, or those of them that an index chooses.  Both lie in the
paged cache: a row at its token's slot, entry e of a request in the block of its first token, as its row e % rows of the
block.  Decodes are computed together while they are short, prompts in tiles of queries.
"""

from dataclasses import dataclass

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.tiles import slots_of
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, states_at

_TILE = 64
# Tokens of all decodes whose entries are read at once: bounds what is copied out of the cache.
_MAX_TOKENS = 1 << 20
# Bounds the scores of one tile, for the index: queries x heads x entries.
_MAX_SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """A step's index queries (N, heads, dim), the weights of their heads (N, heads) float32, and the entries' index
    rows; the ``top_k`` best entries are chosen."""

    queries: torch.Tensor
    weights: torch.Tensor
    kv: LayerKv
    top_k: int

    def choose(self, tokens: slice, keys: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries (t, k) that ``tokens`` attend to, of their first ``counts`` (t,), and which of these are some;
        ``keys`` (t or 1, entries, dim)."""
        scores = torch.einsum("thd,ted->the", self.queries[tokens].float(), keys.float().expand(len(counts), -1, -1))
        found = torch.einsum("the,th->te", scores.relu_(), self.weights[tokens])
        places = torch.arange(found.shape[1], device=found.device, dtype=torch.int64)
        found.masked_fill_(places >= counts[:, None], -torch.inf)
        best = found.topk(min(self.top_k, found.shape[1]), 1).indices
        return best, best < counts[:, None]


@dataclass(frozen=True, slots=True)
class CachedEntries:
    """A layer's entries in the cache, one for ``rate`` tokens, and their group's step; ``index`` chooses some."""

    kv: LayerKv
    rate: int
    metadata: AttentionMetadata
    index: IndexQueries | None


def attend_compressed(
    query: torch.Tensor, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape, entries: CachedEntries | None
) -> torch.Tensor:
    """``query`` (N, heads, head_dim) -> the same, of rows and entries that are stored."""
    out, count = torch.zeros_like(query), metadata.num_decodes
    at_once = max(1, _MAX_TOKENS // max(1, int(metadata.host_seq_lens[:count].max(initial=0))))
    for first in range(0, count, at_once):
        own = slice(first, min(first + at_once, count))
        positions, longest = metadata.seq_lens[own].long() - 1, int(metadata.host_seq_lens[own].max())
        out[own] = _attend(query, own, positions, longest, own, kv, metadata, shape, entries)
    start = count
    lengths, ends = metadata.host_query_lens[count:].tolist(), metadata.host_seq_lens[count:].tolist()
    for request, (length, end) in enumerate(zip(lengths, ends, strict=True), start=count):
        for first in range(0, length, _TILE):
            tokens = slice(start + first, start + min(first + _TILE, length))
            begin, last = end - length + first, end - length + min(first + _TILE, length)
            positions = torch.arange(begin, last, device=query.device, dtype=torch.int64)
            own = slice(request, request + 1)
            out[tokens] = _attend(query, tokens, positions, last, own, kv, metadata, shape, entries)
        start += length
    return out


def _attend(
    query: torch.Tensor,
    tokens: slice,
    positions: torch.Tensor,
    longest: int,
    requests: slice,
    kv: LayerKv,
    metadata: AttentionMetadata,
    shape: AttentionShape,
    entries: CachedEntries | None,
) -> torch.Tensor:
    """The queries ``tokens`` at ``positions`` (t,), each of a request of its own, or all of one of ``requests``."""
    window, table = shape.sliding_window, metadata.block_table[requests]
    assert window is not None and shape.sinks is not None
    is_one = len(table) == 1
    if is_one:  # the rows of all windows, once
        first = int(longest - len(positions)) - window + 1 if len(positions) > 1 else longest - window
        places = torch.arange(max(0, first), longest, device=query.device, dtype=torch.int64)[None]
    else:
        places = positions[:, None] - window + 1 + torch.arange(window, device=query.device, dtype=torch.int64)
    own = positions[:, None]
    seen = (places >= 0) & (places <= own) & (places > own - window)
    rows = _rows(kv, table, torch.where(places < 0, own[: len(places)], places))
    found = [(rows, seen)]
    if entries is not None and (count := longest // entries.rate):
        found += _entries_of(entries, tokens, positions, count, requests)
    return _softmax(query[tokens], found, shape)


def _entries_of(
    entries: CachedEntries, tokens: slice, positions: torch.Tensor, count: int, requests: slice
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The entries that queries see, of the first ``count`` of their requests: (t or 1, n, width) and which (t, n)."""
    table, counts = entries.metadata.block_table[requests], (positions + 1) // entries.rate
    places = torch.arange(count, device=positions.device, dtype=torch.int64)[None].expand(len(table), -1)
    if len(table) > 1:  # behind a request's last entry the first one is repeated
        places = torch.where(places < counts[:, None], places, 0)
    if (index := entries.index) is None or count <= index.top_k:
        numbers = torch.arange(count, device=positions.device, dtype=torch.int64)
        return [(_rows(entries.kv, table, places), numbers < counts[:, None])]
    keys = _rows(index.kv, table, places)
    step = len(positions)
    if len(table) == 1:
        step = max(1, _MAX_SCORES[positions.device.type] // (index.queries.shape[1] * count))
    parts = []
    for first in range(0, len(positions), step):
        own = slice(tokens.start + first, min(tokens.start + first + step, tokens.stop))
        parts.append(index.choose(own, keys, counts[first : first + step]))
    chosen, seen = (torch.cat(part) for part in zip(*parts, strict=True))
    return [(_rows(entries.kv, table.expand(len(chosen), -1), torch.where(seen, chosen, 0)), seen)]


def _rows(kv: LayerKv, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows (r, n, width) at ``places`` (r, n) of requests with ``table`` (r, M)."""
    slots = slots_of(table, places, kv.cache.shape[2])
    rows: torch.Tensor = states_at(kv, 0, slots.flatten()).squeeze(1)
    return rows.view(*slots.shape, -1)


def _softmax(
    query: torch.Tensor, found: list[tuple[torch.Tensor, torch.Tensor]], shape: AttentionShape
) -> torch.Tensor:
    """``query`` (t, heads, head_dim) over all ``found`` rows (t or 1, n, head_dim) that are seen (t, n), and the
    sinks."""
    assert shape.sinks is not None
    scores, values = [shape.sinks.float()[None, :, None].expand(len(query), -1, -1)], []
    for rows, seen in found:
        # Memory that is not seen may hold NaN, of another request.
        is_hidden = ~(seen.any(0, keepdim=True) if len(rows) == 1 else seen)
        values.append(rows.masked_fill(is_hidden[..., None], 0.0).to(query.dtype))
        scored = _times(query, values[-1].transpose(1, 2)).float() * shape.scale
        scores.append(scored.masked_fill_(~seen[:, None], -torch.inf))
    weights = torch.cat(scores, 2).softmax(2).to(query.dtype)[..., 1:]
    parts = weights.split([own.shape[1] for own in values], 2)
    return torch.stack([_times(part, own) for part, own in zip(parts, values, strict=True)]).sum(0)


def _times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(t, heads, a) @ (t or 1, a, b) -> (t, heads, b)."""
    if len(right) > 1:
        return left @ right
    found: torch.Tensor = left.flatten(0, 1) @ right[0]
    return found.view(*left.shape[:2], -1)
