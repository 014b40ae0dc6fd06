"""Log-probabilities of chosen tokens and of the likeliest ones, from raw or from processed logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import torch

from tp_engine.plan import TokenLogprobs
from tp_engine.sampling.filters import filtered
from tp_engine.sampling.groups import StepGroups
from tp_engine.sampling.ranking import rank_candidates, row_chunks

Fetch: TypeAlias = Callable[[Sequence[torch.Tensor]], Callable[[], list[npt.NDArray[Any]]]]
"""Begins to copy tensors to the host; the returned function waits, and returns their arrays."""


class LogprobTensors(NamedTuple):
    """``TokenLogprobs`` still on the device: ids (n, 1 + k) int32, logprobs (n, 1 + k) float32, ranks (n,) int32."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """All rows of ``parts``, one or more of the same width, in their order."""
        return parts[0] if len(parts) == 1 else LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))

    def to_host(self, fetch: Fetch) -> Callable[[], TokenLogprobs]:
        """Begin to copy; the returned function waits."""
        fetched = fetch(self)

        def wait() -> TokenLogprobs:
            token_ids, logprobs, ranks = fetched()
            return TokenLogprobs(token_ids=token_ids, logprobs=logprobs, ranks=ranks)

        return wait


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobTensors:
    """Score ``token_ids`` (n,) and the ``k`` likeliest tokens under ``logits`` (n, vocab) of any float type.

    A rank is 1 + the number of tokens with a larger logit, so equal tokens share the better rank and an argmax has
    rank 1.  Alternatives with equal logits come in order of their ids.  ``k`` beyond the vocabulary is cut to it.
    """
    k = min(k, logits.shape[1])
    parts = [
        _chunk_logprobs(logits[start:stop].float(), token_ids[start:stop], k)
        for start, stop in row_chunks(logits.shape[0], logits.shape[1], logits.device)
    ]
    if not parts:
        parts = [_chunk_logprobs(logits.float(), token_ids, k)]
    return LogprobTensors.joined(parts)


def _chunk_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobTensors:
    chosen = logits.gather(1, token_ids[:, None].to(torch.int64))
    ids, values = token_ids[:, None].to(torch.int32), chosen
    if k > 0:
        top_values, top_ids = rank_candidates(logits, k)
        ids, values = torch.cat((ids, top_ids), dim=1), torch.cat((values, top_values), dim=1)
    return LogprobTensors(
        token_ids=ids,
        logprobs=values - logits.logsumexp(-1, keepdim=True),
        ranks=(logits > chosen).sum(-1, dtype=torch.int32) + 1,
    )


def _spread(scored: LogprobTensors, places: torch.Tensor, num_rows: int) -> LogprobTensors:
    """Put the scored rows at ``places`` (m,) int64 among ``num_rows``; the others are zero and never read."""
    wide = ((part, part.new_zeros((num_rows, *part.shape[1:]))) for part in scored)
    return LogprobTensors(*(room.index_copy_(0, places, part) for part, room in wide))


def score_rows(logits: torch.Tensor, token_ids: torch.Tensor, groups: StepGroups) -> LogprobTensors:
    """Log-probabilities of the sampled ``token_ids`` (n,) for the rows that ask for them, zeros for the others.

    ``logits`` (s, vocab) are those of the rows that ask, in their order: raw, or from ``ProcessedRows.logits_of``.
    """
    assert groups.scored is not None
    if groups.processed is not None:
        logits = filtered(logits, groups.processed.group)
    if len(groups.scored) == len(token_ids):
        return logprobs_of(logits, token_ids, groups.num_logprobs)
    scored = logprobs_of(logits, token_ids.index_select(0, groups.scored), groups.num_logprobs)
    return _spread(scored, groups.scored, len(token_ids))
