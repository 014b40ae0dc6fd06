"""Prompt lookup for several texts in one launch: the Triton twin of ``ngram_drafts``.

One program looks one text up, BLOCK ends of matches at a time; a block ends where none of them matches any more, for
most of them after the last token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.steps.ngram_drafts import NO_DRAFT

_BLOCK = 1024
_NO_DRAFT = tl.constexpr(NO_DRAFT)


@triton.jit  # type: ignore[untyped-decorator]
def ngram_drafts_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    rows,
    lengths,
    drafts,
    matched,
    token_stride,
    SHORTEST: tl.constexpr,  # noqa: N803
    LONGEST: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
    PADDED_COUNT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program: one text.  The best match is the greatest of (length, end), as one number."""
    request = tl.program_id(0)
    text = token_ids + tl.load(rows + request) * token_stride
    last = tl.load(lengths + request) - 1
    best = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, last, BLOCK):
        end = start + tl.arange(0, BLOCK)
        is_match = end < last
        length = tl.zeros((BLOCK,), dtype=tl.int32)
        behind, num_left = 0, 1
        while (behind < LONGEST) & (num_left > 0):
            is_match = is_match & (end >= behind)
            token = tl.load(text + tl.maximum(last - behind, 0))
            is_match = is_match & (tl.load(text + end - behind, mask=is_match, other=0) == token)
            length += is_match.to(tl.int32)
            num_left = tl.sum(is_match.to(tl.int32), 0)
            behind += 1
        best = tl.maximum(best, (length.to(tl.int64) << 32) + end)
    top = tl.max(best, 0)
    length, end = (top >> 32).to(tl.int32), (top & 0x7FFFFFFF).to(tl.int32)
    is_found = length >= SHORTEST
    period = tl.where(is_found, last - end, 1)
    place = tl.arange(0, PADDED_COUNT)
    is_draft = place < COUNT
    tokens = tl.load(text + end + 1 + place % period, mask=is_draft & is_found, other=_NO_DRAFT)
    tl.store(drafts + request * COUNT + place, tokens, mask=is_draft)
    tl.store(matched + request, tl.where(is_found, length, 0))


def ngram_drafts_triton(
    token_ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, shortest: int, longest: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ngram_drafts.ngram_drafts``."""
    assert token_ids.stride(1) == 1 and rows.is_contiguous() and lengths.is_contiguous()
    drafts = torch.empty((len(rows), count), dtype=torch.int32, device=token_ids.device)
    matched = torch.empty(len(rows), dtype=torch.int32, device=token_ids.device)
    ngram_drafts_kernel[(len(rows),)](
        token_ids,
        rows,
        lengths,
        drafts,
        matched,
        token_ids.stride(0),
        SHORTEST=shortest,
        LONGEST=longest,
        COUNT=count,
        PADDED_COUNT=triton.next_power_of_2(count),
        BLOCK=_BLOCK,
    )
    return drafts, matched
