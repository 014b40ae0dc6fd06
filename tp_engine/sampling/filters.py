"""Which tokens may be drawn, and drawing one: top_k, top_p, min_p and Gumbel-max over vocabulary or candidates.

The filters run in the order top_k, top_p (renormalised over the top k), min_p (relative to the likeliest), each after
the temperature; at least one token is always kept.  Tokens are ranked by logit, equal logits by the lower id first, so
top_k keeps exactly k tokens.  Nothing here depends on which other rows are in the batch or on how many candidates were
ranked: ranks have no ties, and cumulative probabilities are sums of integers, exact in any order.
"""

from __future__ import annotations

import torch

from tp_engine.sampling.groups import RowGroup
from tp_engine.sampling.noise import gumbel_noise

_WEIGHT_ONE = float(1 << 36)  # fixed-point 1.0: a sum over 2**17 tokens still fits float64's 53 bits
_ARGMAX_BLOCK = 128
_NUCLEUS_GUESSES = (256, 4096)


def row_argmax(scores: torch.Tensor) -> torch.Tensor:
    """Index (m,) int64 of the first maximum of each row of ``scores`` (m, c); a NaN is above all numbers.

    On CPU torch's argmax reads one element at a time.  numpy's is vectorised (ten times faster), but knows no bfloat16;
    there block maxima first are 3 to 10 times faster, because amax is vectorised.  All give the same index.
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
    inside = blocks[torch.arange(num_rows), best[:, 0]].argmax(-1, keepdim=True)
    index = best * _ARGMAX_BLOCK + inside
    if tail < width:
        rest = scores[:, tail:]
        last = rest.argmax(-1, keepdim=True)
        rival, champion = rest.gather(1, last), maxima.gather(1, best)
        better = (rival > champion) | (rival.isnan() & ~champion.isnan())
        index = torch.where(better, last + tail, index)
    return index[:, 0]


def rank_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest tokens in order: values (m, count) float32 and ids (m, count) int32.

    ``logits`` is (m, vocab) float32.  Value and id are packed in one integer, hence no ties::

        bit 63 ............ 32 31 ............ 0
            order-preserving    minus the id
            int32 of the float
    """
    vocab = logits.shape[1]
    bits = logits.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # its own inverse
    ids = torch.arange(vocab, device=logits.device)
    keys = (ordered.to(torch.int64) << 32).sub_(ids)
    top = keys.topk(count).values if count < vocab else keys.sort(dim=-1, descending=True).values
    token_ids = (-top) & 0xFFFFFFFF
    high = ((top + token_ids) >> 32).to(torch.int32)
    values = (high ^ ((high >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, token_ids.to(torch.int32)


def _weights(scaled: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities as int64 fixed point, the likeliest token having ``_WEIGHT_ONE``."""
    return (scaled - maximum).exp_().mul_(_WEIGHT_ONE).to(torch.int64)


def keep_mask(scaled: torch.Tensor, group: RowGroup, total: torch.Tensor | None = None) -> torch.Tensor:
    """Which of the ranked candidates may be drawn (m, c), given ``scaled`` (m, c): logits over temperature, in order.

    ``total`` (m, 1) is the weight of all tokens where the candidates are not all tokens that top_k leaves.
    """
    keep = torch.arange(scaled.shape[1], device=scaled.device) < group.top_k
    maximum = scaled[:, :1]
    weights = _weights(scaled, maximum) * keep
    inclusive = weights.cumsum(-1)
    whole = inclusive[:, -1:] if total is None else total
    keep &= ((inclusive - weights).double() < group.top_p * whole.double()) | (group.top_p >= 1.0)
    keep &= scaled - maximum >= group.log_min_p
    keep[:, 0] = True
    return keep


def _pick(scaled: torch.Tensor, token_ids: torch.Tensor, keep: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    scores = gumbel_noise(token_ids, keys).add_(scaled).masked_fill_(~keep, -torch.inf)
    return token_ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def draw_ranked(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor, count: int) -> torch.Tensor:
    """Draw (m,) int32 from the ``count`` likeliest tokens of ``logits`` (m, vocab) float32."""
    values, token_ids = rank_candidates(logits, count)
    scaled = values.div_(group.temperature)
    return _pick(scaled, token_ids, keep_mask(scaled, group), keys)


def draw_nucleus(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
    """Draw (m,) int32 under top_p and min_p without top_k.

    The nucleus may be as large as the vocabulary.  On CPU, where looking at a result is free, a small one spares the
    full sort; elsewhere looking would stop the device, so all tokens are sorted.  Both give the same token.
    """
    vocab = logits.shape[1]
    if logits.device.type != "cpu":
        return draw_ranked(logits, group, keys, vocab)
    maximum = logits.amax(-1, keepdim=True) / group.temperature
    total = _weights(logits / group.temperature, maximum).sum(-1, keepdim=True)
    for count in _NUCLEUS_GUESSES:
        if count < vocab:
            values, token_ids = rank_candidates(logits, count)
            scaled = values.div_(group.temperature)
            keep = keep_mask(scaled, group, total)
            if not bool(keep[:, -1].any()):
                return _pick(scaled, token_ids, keep, keys)
    return draw_ranked(logits, group, keys, vocab)


def draw_any(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor, vocab_ids: torch.Tensor) -> torch.Tensor:
    """Draw (m,) from all tokens, or under min_p, which needs no order.  ``vocab_ids`` is arange(vocab) int32."""
    scaled = logits / group.temperature
    scores = gumbel_noise(vocab_ids, keys).add_(scaled)
    if group.uses_min_p:
        scores.masked_fill_(~(scaled - scaled.amax(-1, keepdim=True) >= group.log_min_p), -torch.inf)
    return row_argmax(scores)
