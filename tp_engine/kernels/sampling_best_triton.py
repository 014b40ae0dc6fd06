"""The best token of every row after penalties, temperature and noise, as one pass over the logits.

The Triton twin of ``sampling``'s GREEDY and ANY ways (``penalties``, ``filters.noisy_scores``, ``ranking.best_keys``)::

    program (i, j): columns [j * BLOCK, (j + 1) * BLOCK) of step row i  ->  one rank key;  torch's amax merges them

Parameters come from tables by row of the batch, so a captured launch serves any rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
    seeds,
    output_counts,
    in_prompt,
    maxima,
    out,
    logits_stride,
    counts_stride,
    num_ids,
    first_id,
    NUM_FLOATS: tl.constexpr,  # noqa: N803
    PENALISES: tl.constexpr,  # noqa: N803
    HAS_MAXIMA: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program: the best of BLOCK columns of a row.  A padding row (-1) takes the parameters of row 0."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.maximum(tl.load(rows + place).to(tl.int64), 0)
    parameters = floats + row * NUM_FLOATS
    temperature = tl.load(parameters)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_ids
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
    if temperature > 0:
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
) -> torch.Tensor:
    """Rank keys (n,) int64 of the best tokens of ``logits`` (n, num_ids), whose column 0 is token ``first_id``.

    ``rows`` and ``positions`` (n,) integers on the device; a negative row is padding.  ``counts`` where rows may be
    penalised.  ``maxima`` (n,) float32, the largest of all ranks' logits, where rows may have min_p.
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
        tables.seeds,
        counts.output_counts if counts else None,
        counts.in_prompt if counts else None,
        maxima,
        out,
        logits.stride(0),
        counts.output_counts.stride(0) if counts else 0,
        num_ids,
        first_id,
        NUM_FLOATS=NUM_FLOATS,
        PENALISES=counts is not None,
        HAS_MAXIMA=maxima is not None,
        BLOCK=_BLOCK,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    return out.amax(-1)
