"""The best token of every row after penalties, temperature and noise, as one pass over the logits.

The Triton twin of ``sampling``'s GREEDY and ANY ways (``penalties``, ``filters.noisy_scores``, ``ranking.best_keys``)::

    program (i, j): columns [j * BLOCK, (j + 1) * BLOCK) of step row i  ->  one rank key;  torch's amax merges them

Parameters come from tables by row of the batch, so a captured launch serves any rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.sampling_filter_triton import is_filtered
from tp_engine.kernels.sampling_noise_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    gumbel_noise,
    noise_key,
    pack_scores,
)
from tp_engine.kernels.sampling_tables import NUM_FLOATS, CountTables, SamplingTables

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def best_keys_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    positions,
    floats,
    top_ks,
    seeds,
    output_counts,
    in_prompt,
    maxima,
    out,
    logits_stride,
    counts_stride,
    num_ids,
    first_id,
    vocab_size,
    NUM_FLOATS: tl.constexpr,  # noqa: N803
    PENALISES: tl.constexpr,  # noqa: N803
    HAS_MAXIMA: tl.constexpr,  # noqa: N803
    SKIPS_FILTERED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: the best of BLOCK columns of a row.  A padding row (-1) takes the parameters of row 0.

    With SKIPS_FILTERED, rows with top_k or top_p, which others draw, have the lowest key.
    """
    let_next_begin(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.maximum(tl.load(rows + place).to(tl.int64), 0)
    parameters = floats + row * NUM_FLOATS
    temperature = tl.load(parameters)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_ids
    if SKIPS_FILTERED:
        inside = inside & (is_filtered(parameters, tl.load(top_ks + row), vocab_size) == 0)
    scores = tl.load(logits + place * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    if PENALISES:
        counts = tl.load(output_counts + row * counts_stride + column, mask=inside, other=0)
        prompt = tl.load(in_prompt + row * counts_stride + column, mask=inside, other=0)
        repetition = tl.load(parameters + 3)
        repeated = tl.where(scores > 0, tl.math.div_rn(scores, repetition), scores * repetition)
        scores = tl.where((counts > 0) | (prompt != 0), repeated, scores)
        scores = scores - counts.to(tl.float32) * tl.load(parameters + 4)
        scores = scores - (counts > 0).to(tl.float32) * tl.load(parameters + 5)
    token_ids = column + first_id
    if (temperature > 0) & (tl.max(inside.to(tl.int32), axis=0) > 0):
        scaled = tl.math.div_rn(scores, temperature)
        word_1, word_2 = noise_key(tl.load(seeds + row), tl.load(positions + place))
        scores = gumbel_noise(token_ids, word_1, word_2) + scaled
        if HAS_MAXIMA:
            highest = tl.math.div_rn(tl.load(maxima + place), temperature)
            is_likely = scaled - highest >= tl.load(parameters + 2)
            scores = tl.where(is_likely, scores, float("-inf"))
    keys = tl.where(inside, pack_scores(scores, token_ids), LOWEST_KEY)
    tl.store(out + place * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0))


def best_keys_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    *,
    first_id: int,
    counts: CountTables | None = None,
    maxima: torch.Tensor | None = None,
    filtered_below: int | None = None,
) -> torch.Tensor:
    """Rank keys (n,) int64 of the best tokens of ``logits`` (n, num_ids), whose column 0 is token ``first_id``.

    ``rows`` and ``positions`` (n,) integers on the device; a negative row is padding.  ``counts`` where rows may be
    penalised.  ``maxima`` (n,) float32, the largest of all ranks' logits, where rows may have min_p.
    ``filtered_below``, the vocabulary's size, where rows may have a top_k below it, or top_p: others draw those, and
    their keys here mean nothing.
    """
    num_rows, num_ids = logits.shape
    assert num_ids > 0 and logits.stride(1) == 1, (logits.shape, logits.stride())
    num_blocks = triton.cdiv(num_ids, _BLOCK)
    out = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    best_keys_kernel[(num_rows, num_blocks)](
        logits,
        rows,
        positions,
        tables.floats,
        tables.top_k,
        tables.seeds,
        counts.output_counts if counts else None,
        counts.in_prompt if counts else None,
        maxima,
        out,
        logits.stride(0),
        counts.output_counts.stride(0) if counts else 0,
        num_ids,
        first_id,
        filtered_below or 0,
        NUM_FLOATS=NUM_FLOATS,
        PENALISES=counts is not None,
        HAS_MAXIMA=maxima is not None,
        SKIPS_FILTERED=filtered_below is not None,
        BLOCK=_BLOCK,
        num_warps=8,
        **dependent_launch(logits.device),
        **LAUNCH_OPTIONS,
    )
    return out.amax(-1)
