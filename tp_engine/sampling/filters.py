"""Which tokens may be drawn, and drawing one: top_k, top_p, min_p and Gumbel-max over vocabulary or candidates.

The filters run in the order top_k, top_p (renormalised over the top k), min_p (relative to the likeliest), each after
the temperature; at least one token is always kept.  Tokens are ranked by logit, equal logits by the lower id first, so
top_k keeps exactly k tokens.  Nothing here depends on the other rows of the batch or on the number of ranked
candidates: the order has no ties, and cumulative probabilities are sums of integers, exact in any order.
"""

from functools import cache

import torch

from tp_engine.kernels.ops import has_triton
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.sampling.groups import RowGroup, SamplingMethod
from tp_engine.sampling.noise import gumbel_noise
from tp_engine.sampling.ranking import rank_candidates, row_argmax, row_chunks

NUCLEUS_START = 256
_NUCLEUS_STARTS = (NUCLEUS_START, 4096)
_WEIGHT_ONE = float(1 << 36)  # fixed-point 1.0: a sum over 2**17 tokens still fits float64's 53 bits


def fixed_weights(scaled: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities as int64 fixed point, the likeliest token having ``_WEIGHT_ONE``."""
    return (scaled - maximum).exp_().mul_(_WEIGHT_ONE).to(torch.int64)


def keep_mask(scaled: torch.Tensor, group: RowGroup, total: torch.Tensor | None = None) -> torch.Tensor:
    """Which of the ranked candidates may be drawn (m, c), given ``scaled`` (m, c): logits over temperature, in order.

    ``total`` (m, 1) is the weight of all tokens if the candidates are only some of the tokens that top_k leaves.
    """
    keep = torch.arange(scaled.shape[1], device=scaled.device, dtype=torch.int64) < group.top_k
    maximum = scaled[:, :1]
    weights = fixed_weights(scaled, maximum) * keep
    inclusive = weights.cumsum(-1)
    whole = inclusive[:, -1:] if total is None else total
    keep &= ((inclusive - weights).double() < group.top_p * whole.double()) | (group.top_p >= 1.0)
    keep &= scaled - maximum >= group.log_min_p
    keep[:, 0] = True
    return keep


def pick(scaled: torch.Tensor, token_ids: torch.Tensor, keep: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw (m,) int32 among the candidates ``token_ids`` (m, c) that ``keep`` marks."""
    scores = gumbel_noise(token_ids, keys).add_(scaled).masked_fill_(~keep, -torch.inf)
    return token_ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def draw(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor | None, vocab_ids: torch.Tensor) -> torch.Tensor:
    """Draw (m,) int32 from ``logits`` (m, vocab), of any float type, by the group's method.

    ``keys`` (m, 2) int32 are the rows' noise keys, None for greedy rows; ``vocab_ids`` is arange(vocab) int32.
    """
    if keys is None or group.method is SamplingMethod.GREEDY:
        return row_argmax(logits).to(torch.int32)
    logits = logits.to(torch.float32)
    if group.method is SamplingMethod.ANY:
        return row_argmax(noisy_scores(logits, group, keys, vocab_ids)).to(torch.int32)
    if draws_by_kernel(logits.device.type):
        return draw_filtered(logits, group, keys)
    if group.method is SamplingMethod.NUCLEUS:
        return draw_nucleus(logits, group, keys)
    return draw_ranked(
        logits, group, keys, group.largest_top_k if group.method is SamplingMethod.RANKED else logits.shape[1]
    )


def draw_ranked(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor, count: int) -> torch.Tensor:
    """Draw (m,) int32 from the ``count`` likeliest tokens of ``logits`` (m, vocab) float32."""
    values, token_ids = rank_candidates(logits, count)
    scaled = values.div_(group.temperature)
    return pick(scaled, token_ids, keep_mask(scaled, group), keys)


def filtered(logits: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """The logits (m, vocab) float32 from which the rows are drawn: over the temperature, -inf for filtered tokens."""
    parts = []
    for start, stop in row_chunks(logits.shape[0], logits.shape[1], logits.device):
        part, own = group.part(start, stop), logits[start:stop]
        values, token_ids = rank_candidates(own, logits.shape[1])
        banned = torch.zeros_like(own, dtype=torch.bool)
        keep = keep_mask(values.div_(part.temperature), part)
        parts.append((own / part.temperature).masked_fill_(banned.scatter_(1, token_ids.long(), ~keep), -torch.inf))
    return torch.cat(parts)


def draw_nucleus(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
    """Draw (m,) int32 under top_p and min_p without top_k.

    The nucleus may be as large as the vocabulary.  A CPU looks for a small one first, which saves the full sort; with a
    GPU the host would have to wait for that result, so all tokens are sorted.  Both give the same token.
    """
    vocab = logits.shape[1]
    if logits.device.type != "cpu":
        return draw_ranked(logits, group, keys, vocab)
    maximum = logits.amax(-1, keepdim=True) / group.temperature
    total = fixed_weights(logits / group.temperature, maximum).sum(-1, keepdim=True)
    for count in _NUCLEUS_STARTS:
        if count < vocab:
            values, token_ids = rank_candidates(logits, count)
            scaled = values.div_(group.temperature)
            keep = keep_mask(scaled, group, total)
            if not bool(keep[:, -1].any()):
                return pick(scaled, token_ids, keep, keys)
    return draw_ranked(logits, group, keys, vocab)


def noisy_scores(
    logits: torch.Tensor,
    group: RowGroup,
    keys: torch.Tensor,
    token_ids: torch.Tensor,
    maximum: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores (m, c) whose argmax is a draw from all tokens, or from those that min_p leaves.

    ``logits`` (m, c) float32 of ``token_ids`` (c,) int32.  If these are only a part of the vocabulary, ``maximum``
    (m, 1) is the largest of all logits.
    """
    scaled = logits / group.temperature
    scores = gumbel_noise(token_ids, keys).add_(scaled)
    if group.uses_min_p:
        likeliest = scaled.amax(-1, keepdim=True) if maximum is None else maximum / group.temperature
        scores.masked_fill_(~(scaled - likeliest >= group.log_min_p), -torch.inf)
    return scores


@cache
def draws_by_kernel(device_type: str) -> bool:
    """Whether ``draw_filtered`` runs on ``device_type``."""
    return device_type == "cuda" and has_triton()


def draw_filtered(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
    """``draw`` for a group with top_k or top_p by kernels, which need no sort: (m,) int32."""
    from tp_engine.kernels.sampling.best_triton import best_tokens_triton
    from tp_engine.kernels.sampling.candidates_triton import draw_ranked_triton
    from tp_engine.kernels.sampling.nucleus_triton import draw_nucleus_triton

    num_rows, vocab_size = logits.shape
    unused = torch.zeros_like(group.temperature)
    columns = (group.temperature, group.top_p.to(torch.float32), group.log_min_p, unused, unused, unused)
    tables = SamplingTables(
        floats=torch.cat(columns, dim=1),
        top_k=group.top_k[:, 0].to(torch.int32),
        seeds=torch.zeros(num_rows, dtype=torch.int64, device=logits.device),
        arrivals=torch.zeros(num_rows, dtype=torch.int32, device=logits.device),
    )
    rows, keys = torch.arange(num_rows, dtype=torch.int32, device=logits.device), keys.contiguous()
    best = best_tokens_triton(
        logits, rows, None, tables, first_id=0, ranked_below=vocab_size, finds_maxima=True, noise_keys=keys
    )
    draw_nucleus_triton(logits, rows, None, tables, best, noise_keys=keys)
    draw_ranked_triton(logits, rows, None, tables, best.token_ids, noise_keys=keys)
    return best.token_ids
