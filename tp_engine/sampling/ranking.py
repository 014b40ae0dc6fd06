"""The order of tokens: larger logits first, equal logits by the lower id.

Value and id are packed in one integer, a *rank key*, so that there are no ties and integers alone decide::

    bit 63 ............ 32 31 ............ 0
        order-preserving    minus the id
        int32 of the float

Keys of several parts of the vocabulary are merged by comparing them, on any rank.  ``row_chunks`` bounds the memory
that many rows take.
"""

from collections.abc import Iterator

import numpy as np
import torch

from tp_engine.system.units import ceil_div

LOWEST_KEY = -(2**63)  # below the key of every token
_ARGMAX_BLOCK = 128
_CPU_ELEMENTS = 1 << 16
_DEVICE_ELEMENTS = 1 << 23


def row_argmax(scores: torch.Tensor) -> torch.Tensor:
    """Index (m,) int64 of the first maximum of each row of ``scores`` (m, c); NaN is above all numbers.

    On CPU torch's argmax reads one element at a time.  numpy's is vectorised (ten times faster), but has no bfloat16;
    for bfloat16, maxima of blocks come first (3 to 10 times faster: amax is vectorised).  All give the same index.
    """
    if scores.device.type == "cpu" and scores.dtype is torch.float32:
        return torch.from_numpy(scores.numpy().argmax(-1))
    num_rows, width = scores.shape
    num_blocks = width // _ARGMAX_BLOCK
    if scores.device.type != "cpu" or num_blocks < 2:
        return scores.argmax(-1)
    tail = num_blocks * _ARGMAX_BLOCK
    blocks = scores[:, :tail].reshape(num_rows, num_blocks, _ARGMAX_BLOCK)  # a view
    maxima = blocks.amax(-1)  # (m, blocks)
    best = maxima.argmax(-1, keepdim=True)
    inside = blocks[torch.arange(num_rows, dtype=torch.int64, device="cpu"), best[:, 0]].argmax(-1, keepdim=True)
    index = best * _ARGMAX_BLOCK + inside
    if tail < width:
        rest = scores[:, tail:]
        last = rest.argmax(-1, keepdim=True)
        rival, champion = rest.gather(1, last), maxima.gather(1, best)
        better = (rival > champion) | (rival.isnan() & ~champion.isnan())
        index = torch.where(better, last + tail, index)
    return index[:, 0]


def pack_keys(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rank keys int64 of ``values`` float32 and ``token_ids`` (int32 or int64) of the same or a broadcast shape."""
    bits = values.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # its own inverse
    return (ordered.to(torch.int64) << 32).sub_(token_ids)


def key_ids(keys: torch.Tensor) -> torch.Tensor:
    """The token ids int32 of rank keys."""
    return ((-keys) & 0xFFFFFFFF).to(torch.int32)


def unpack_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values float32 and token ids int32 of rank keys."""
    token_ids = (-keys) & 0xFFFFFFFF
    high = ((keys + token_ids) >> 32).to(torch.int32)
    values = (high ^ ((high >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, token_ids.to(torch.int32)


def best_keys(scores: torch.Tensor, first_id: int) -> torch.Tensor:
    """Rank key (m,) of each row's first maximum; column 0 of ``scores`` (m, c), any float type, is ``first_id``.

    The largest of several parts' keys is that of the first maximum of the whole row: zeros of both signs are equal, and
    NaN is above all numbers, as in ``row_argmax``.
    """
    index = row_argmax(scores)
    values = scores.gather(1, index[:, None])[:, 0].to(torch.float32) + 0.0
    return pack_keys(torch.where(values.isnan(), torch.nan, values), index + first_id)


def top_keys(logits: torch.Tensor, count: int, first_id: int = 0) -> torch.Tensor:
    """Rank keys (m, count) of the likeliest tokens in order; column 0 of ``logits`` (m, c) float32 is ``first_id``."""
    num_ids = logits.shape[1]
    return largest_keys(
        pack_keys(logits, torch.arange(first_id, first_id + num_ids, device=logits.device, dtype=torch.int64)), count
    )


def largest_keys(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest of ``keys`` (m, c) int64 in falling order, (m, count).

    On CPU numpy's vectorised partition and sort are 10 to 20 times faster than torch's.
    """
    if keys.device.type != "cpu":
        return keys.topk(count).values if count < keys.shape[1] else keys.sort(dim=-1, descending=True).values
    rising = np.invert(keys.numpy())
    if count < keys.shape[1]:
        rising = np.partition(rising, count - 1, axis=-1)[:, :count]
    rising.sort(axis=-1)
    return torch.from_numpy(np.invert(rising))


def rank_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest tokens of ``logits`` (m, vocab) float32 in order: values float32 and ids int32."""
    return unpack_keys(top_keys(logits, count))


def row_chunks(num_rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop), each at least one of ``num_rows`` rows of ``width`` elements.

    What is computed for them stays in a CPU's cache, or in little device memory.  On CPUs, where the bound is a rule of
    thumb, chunks have about equally many rows: a small rest would take as many operations as the others.
    """
    step = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS) // width)
    if device.type == "cpu":
        step = max(1, ceil_div(num_rows, max(1, round(num_rows / step))))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)
