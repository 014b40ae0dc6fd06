"""Prompt lookup for several texts at once, in plain PyTorch: the twin of ``ngram_drafts_triton``.

::

    a row's text    a b c d e f a b c          the last 3 tokens stand at the beginning too
                          ^^^^^                drafts: d e f, and behind the end of the text again a b c ...
"""

from __future__ import annotations

import torch

NO_DRAFT = -1


def ngram_drafts(
    token_ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, shortest: int, longest: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look the last ``longest`` tokens of texts up in themselves, or fewer down to ``shortest``; of equal matches the
    last one counts.

    ``token_ids`` (R, T) int32 has in ``rows`` (m,) int64 texts of ``lengths`` (m,) int32 tokens, 1 to T.  Returns the
    ``count`` tokens behind each match (m, count) int32, which go on with themselves at the end of the text, or -1; and
    the lengths of the matches (m,) int32, or 0.
    """
    texts, last = token_ids.index_select(0, rows), lengths[:, None].to(torch.int64) - 1
    width = texts.shape[1]
    places = torch.arange(width, device=texts.device)
    is_match = places < last  # so far, of a match that ends here
    matched = torch.zeros(texts.shape, dtype=torch.int64, device=texts.device)
    for behind in range(min(longest, width)):
        token = texts.gather(1, (last - behind).clamp_(min=0))
        is_match[:, :behind] = False
        is_match[:, behind:] &= texts[:, : width - behind] == token
        matched += is_match
    best = (matched * width + places).amax(1, keepdim=True)
    length, end = best // width, best % width
    is_found = length >= shortest
    period = (last - end).masked_fill_(~is_found, 1)
    following = end + 1 + torch.arange(count, device=texts.device) % period
    drafts = texts.gather(1, following.clamp_(max=width - 1)).masked_fill_(~is_found, NO_DRAFT)
    return drafts, (length * is_found)[:, 0].to(torch.int32)
