"""The choice of keys of DeepSeek sparse attention, in plain PyTorch.

DeepSeek-V3.2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) has small *index keys* beside the latents, and for each
query some index queries q_h with weights w_h::

    score(t, s) = sum over h of  w_h max(0, q_h . k_s)                  float32; the scales are in w_h

A query attends to the ``top_k`` keys with the best scores among those that it sees; among equal scores earlier
positions come first, so a choice does not depend on chunks or on the batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.latents import rotate
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, states_at

# Bounds the scores that are in memory at a time, of all index heads.
_MAX_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


class ChosenKeys(NamedTuple):
    """The keys that n decodes attend to: their ``positions`` (n, top_k) int32, rising; the first ``counts`` (n,) int32
    of a row are valid."""

    positions: torch.Tensor
    counts: torch.Tensor


class KeyNorm(NamedTuple):
    """The layer norm of index keys: ``weight`` and ``bias`` (dim,)."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


def prepare_index(
    queries: torch.Tensor,
    keys: torch.Tensor,
    norm: KeyNorm,
    rotation: Rotation,
    is_interleaved: bool,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``queries`` (N, heads, dim), rotated, and ``keys`` (N, dim), normalised and rotated; of each head the first
    ``rotation.rotary_dim`` elements.

    This twin leaves the store to its caller; others may store the keys at the slots ``slot_mapping`` (N,) int64 of
    ``kv``, if there is one, and then return None for them.
    """
    normed = F.layer_norm(keys, norm.weight.shape, norm.weight, norm.bias, norm.eps).unsqueeze(1)
    rotated = (_rotated(heads, rotation, is_interleaved) for heads in (queries, normed))
    return next(rotated), next(rotated).squeeze(1)


def choose_keys(
    queries: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
) -> ChosenKeys:
    """Choose keys for n decodes: ``queries`` (n, heads, dim) with ``weights`` (n, heads) float32, times ``scale``.

    Their index keys lie in ``kv`` at ``block_table`` (n, M) int32; each sees ``seq_lens`` (n,) int32 of them, padding
    none.
    """
    positions = torch.zeros((len(queries), top_k), dtype=torch.int32, device=queries.device)
    counts, block_size = seq_lens.clamp(max=top_k), kv.cache.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        places = torch.arange(length, device=queries.device, dtype=torch.int64)
        if length > top_k:
            slots = block_table[row].long()[places // block_size] * block_size + places % block_size
            keys = states_at(kv, 0, slots).squeeze(1)
            own = slice(row, row + 1)
            positions[row] = choose(queries[own], weights[own] * scale, keys, top_k)[0]
        else:
            positions[row, :length] = places.int()
    return ChosenKeys(positions, counts)


def choose(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int) -> torch.Tensor:
    """``queries`` (t, heads, dim) with ``weights`` (t, heads) float32, of the tokens of the last t of ``keys``
    (n, dim) -> positions (t, top_k) int32, rising, then -1 where a query sees fewer keys."""
    num_queries, num_heads, _ = queries.shape
    num_keys, device = len(keys), queries.device
    count, wide = min(top_k, num_keys), keys.float().T
    out = torch.full((num_queries, top_k), -1, dtype=torch.int32, device=device)
    positions = torch.arange(num_keys, device=device, dtype=torch.int64)
    step = max(1, _MAX_ELEMENTS[device.type] // (num_heads * num_keys))
    for first in range(0, num_queries, step):
        own = slice(first, min(first + step, num_queries))
        products = (queries[own].float().flatten(0, 1) @ wide).relu_().view(-1, num_heads, num_keys)
        scores = torch.bmm(weights[own].unsqueeze(1), products).squeeze(1)
        last = torch.arange(own.start, own.stop, device=device, dtype=torch.int64).unsqueeze(1) + (
            num_keys - num_queries
        )
        is_seen = positions <= last
        scores.masked_fill_(~is_seen, -torch.inf)
        least = scores.topk(count).values[:, -1:]
        is_better, is_equal = scores > least, scores == least
        is_chosen = is_better | (is_equal & (is_equal.cumsum(1) <= count - is_better.sum(1, keepdim=True)))
        rows, found = (is_chosen & is_seen).nonzero().unbind(1)
        places = found.new_ones(len(found)).cumsum(0) - 1
        starts = torch.searchsorted(rows, torch.arange(len(scores), device=device, dtype=torch.int64))
        out[own][rows, places - starts[rows]] = found.int()
    return out


def _rotated(heads: torch.Tensor, rotation: Rotation, is_interleaved: bool) -> torch.Tensor:
    size = rotation.rotary_dim
    return torch.cat((rotate(heads[..., :size], rotation, is_interleaved), heads[..., size:]), -1)
