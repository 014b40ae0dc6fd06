"""The best token of every row after penalties, temperature and noise, in one pass over the logits.

The Triton twin of ``sampling``'s methods GREEDY and ANY (``penalties``, ``filters.noisy_scores``,
``ranking.best_keys``)::

    program (i, j): columns [j * BLOCK, (j + 1) * BLOCK) of step row i  ->  one rank key
    the last program of row i to arrive                                 ->  the row's rank key and token; if asked,
                                                                            also the end of the row's decode step

Parameters come from tables by row of the batch, so a captured launch serves any rows.  A padding row (-1) is greedy.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    MIN_INT32,
    drawn_scores,
    id_of,
    noise_words,
    ordered_bits,
    pack_scores,
    row_of,
    value_of,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, CountTables, SamplingTables
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.kernels.steps.decode_inputs_triton import advance_rows

_BLOCK = 2048


@jit
def best_tokens_kernel(
    logits, rows, positions, floats, top_ks, seeds, noise_keys, output_counts, in_prompt, maxima, arrivals, parts,
    peaks, keys_out, tokens_out, maxima_out, token_table, num_computed, logits_stride, counts_stride, num_ids, first_id,
    vocab_size, token_stride,
    NUM_FLOATS: tl.constexpr, HAS_KEYS: tl.constexpr, PENALISES: tl.constexpr, HAS_MAXIMA: tl.constexpr,
    FINDS_MAXIMA: tl.constexpr, SKIPS_RANKED: tl.constexpr, ADVANCES: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the best of BLOCK columns of a row; the last one joins the BLOCKS (rounded up) of its row.

    With SKIPS_RANKED, rows with top_k have the lowest key: another kernel draws them.
    """
    place = begin_row(PDL)
    row, temperature, top_k = row_of(rows, floats, top_ks, place, NUM_FLOATS)
    parameters = floats + row * NUM_FLOATS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_ids
    if SKIPS_RANKED:
        inside = inside & (((temperature > 0.0) & (top_k < vocab_size)) == 0)
    scores = tl.load(logits + place * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    unedited = ordered_bits(scores)
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
        if HAS_MAXIMA:
            highest = tl.math.div_rn(tl.load(maxima + place), temperature)
            is_likely = tl.math.div_rn(scores, temperature) - highest >= tl.load(parameters + 2)
            scores = tl.where(is_likely, scores, float("-inf"))
        word_1, word_2 = noise_words(noise_keys, seeds, positions, place, row, HAS_KEYS)
        scores = drawn_scores(scores, token_ids, temperature, word_1, word_2)
    keys = tl.where(inside, pack_scores(scores, token_ids), LOWEST_KEY)
    num_blocks = tl.num_programs(1)
    tl.store(parts + place * num_blocks + tl.program_id(1), tl.max(keys, axis=0))
    if FINDS_MAXIMA:
        largest = tl.max(tl.where(inside, unedited, MIN_INT32), axis=0)
        tl.store(peaks + place * num_blocks + tl.program_id(1), largest)
    if arrives_last(arrivals + place, num_blocks):
        block = tl.arange(0, BLOCKS)
        exists = block < num_blocks
        of_blocks = tl.load(parts + place * num_blocks + block, mask=exists, other=LOWEST_KEY, cache_modifier=".cg")
        best = tl.max(of_blocks, axis=0)
        settle_rows(best, place, True, rows, keys_out, tokens_out, token_table, num_computed, token_stride, ADVANCES)
        if FINDS_MAXIMA:
            highest_of = tl.load(peaks + place * num_blocks + block, mask=exists, other=MIN_INT32, cache_modifier=".cg")
            tl.store(maxima_out + place, value_of(tl.max(highest_of, axis=0)))


class BestTokens(NamedTuple):
    """Of each row (n,): the rank key int64 and the token int32 of the best score, and the largest logit float32, or
    None if it was not asked for."""

    keys: torch.Tensor
    token_ids: torch.Tensor
    maxima: torch.Tensor | None


def best_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor | None,
    tables: SamplingTables,
    *,
    first_id: int,
    counts: CountTables | None = None,
    maxima: torch.Tensor | None = None,
    ranked_below: int | None = None,
    finds_maxima: bool = False,
    noise_keys: torch.Tensor | None = None,
    advanced: RowTables | None = None,
) -> BestTokens:
    """The best tokens of ``logits`` (n, num_ids), whose column 0 is token ``first_id``.

    ``rows`` (n,) int32 on the device, negative for padding, and ``positions`` (n,) int64 of their last tokens, or
    ``noise_keys`` (n, 2) int32 instead of these and of the seeds.  ``counts`` is needed if rows may be penalised, and
    ``maxima`` (n,) float32, the largest of all ranks' logits, if they may have min_p.  ``ranked_below`` is the
    vocabulary's size if rows may have a top_k below it: another kernel draws those, and their results here are
    undefined.  ``advanced`` are the tables that then receive the tokens (``decode_inputs.advance_decodes``).
    """
    num_rows, num_ids = logits.shape
    assert num_ids > 0 and logits.stride(1) == 1, (logits.shape, logits.stride())
    assert num_rows <= len(tables.arrivals) and (positions is None) != (noise_keys is None)
    assert advanced is None or ranked_below is None, "the tokens of other kernels come later"
    num_blocks, device = triton.cdiv(num_ids, _BLOCK), logits.device
    parts = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=device)
    keys = torch.empty(num_rows, dtype=torch.int64, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    peaks = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device) if finds_maxima else None
    found = torch.empty(num_rows, dtype=torch.float32, device=device) if finds_maxima else None
    best_tokens_kernel[(num_rows, num_blocks)](
        logits, rows, positions, tables.floats, tables.top_k, tables.seeds, noise_keys,
        counts.output_counts if counts else None, counts.in_prompt if counts else None, maxima, tables.arrivals, parts,
        peaks, keys, token_ids, found, advanced.token_ids if advanced else None,
        advanced.num_computed if advanced else None, logits.stride(0), counts.output_counts.stride(0) if counts else 0,
        num_ids, first_id, ranked_below or 0, advanced.token_ids.stride(0) if advanced else 0,
        NUM_FLOATS=NUM_FLOATS, HAS_KEYS=noise_keys is not None, PENALISES=counts is not None,
        HAS_MAXIMA=maxima is not None, FINDS_MAXIMA=finds_maxima, SKIPS_RANKED=ranked_below is not None,
        ADVANCES=advanced is not None, BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=_BLOCK, num_warps=8,
        **dependent_launch(logits.device), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return BestTokens(keys, token_ids, found)


@jit
def settle_rows(
    best, place, exists, rows, keys_out, tokens_out, token_table, num_computed, token_stride, ADVANCES: tl.constexpr
):
    """Store the ``best`` keys of the rows at ``place``, one or a block, and their tokens; with ADVANCES, append the
    tokens to the rows."""
    tl.store(keys_out + place, best, mask=exists)
    tl.store(tokens_out + place, id_of(best), mask=exists)
    if ADVANCES:
        own_row = tl.load(rows + place, mask=exists, other=-1).to(tl.int64)  # padding is -1, and not row 0
        advance_rows(token_table, num_computed, token_stride, own_row, id_of(best))
