"""The best token of every row after penalties, temperature and noise, as one pass over the logits.

The Triton twin of ``sampling``'s GREEDY and ANY ways (``penalties``, ``filters.noisy_scores``, ``ranking.best_keys``)::

    program (i, j): columns [j * BLOCK, (j + 1) * BLOCK) of step row i  ->  one rank key
    the last program of row i to arrive                                 ->  the row's rank key and token; if asked, it
                                                                            ends the decode step of the row, too

Parameters come from tables by row of the batch, so a captured launch serves any rows.  A padding row (-1) is greedy.

Below is what the other sampling kernels use too: the noise of ``sampling/noise.py`` and the rank keys of
``sampling/ranking.py``.  The hash gives the same bits as its PyTorch twin.  So does the noise on CUDA, where both take
their logarithms from libdevice and round every operation (launch with ``enable_fp_fusion=False``); Triton's interpreter
has no libdevice, and its noise may differ in the last bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.decode_inputs import RowTables
from tp_engine.kernels.decode_inputs_triton import advance_rows
from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.sampling_tables import NUM_FLOATS, CountTables, SamplingTables

LAUNCH_OPTIONS = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where the twin rounds twice

HAS_LIBDEVICE = tl.constexpr(not knobs.runtime.interpret)
LOWEST_KEY = tl.constexpr(-(2**63))
MIN_INT32 = tl.constexpr(-(2**31))
_MASK_31 = tl.constexpr(0x7FFFFFFF)
_M1 = tl.constexpr(0x7FEB352D)
_M2 = tl.constexpr(0x846CA68B - (1 << 32))
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))
_HALF_STEP = tl.constexpr(2.0**-32)
_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def best_tokens_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    positions,
    floats,
    top_ks,
    seeds,
    noise_keys,
    output_counts,
    in_prompt,
    maxima,
    arrivals,
    parts,
    peaks,
    keys_out,
    tokens_out,
    maxima_out,
    token_table,
    num_computed,
    logits_stride,
    counts_stride,
    num_ids,
    first_id,
    vocab_size,
    token_stride,
    NUM_FLOATS: tl.constexpr,  # noqa: N803
    HAS_KEYS: tl.constexpr,  # noqa: N803
    PENALISES: tl.constexpr,  # noqa: N803
    HAS_MAXIMA: tl.constexpr,  # noqa: N803
    FINDS_MAXIMA: tl.constexpr,  # noqa: N803
    SKIPS_RANKED: tl.constexpr,  # noqa: N803
    ADVANCES: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: the best of BLOCK columns of a row; the last one joins the BLOCKS (rounded up) of its row.

    With SKIPS_RANKED, rows with top_k have the lowest key: another kernel draws them.
    """
    let_next_begin(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
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
    """Of each row (n,): the rank key int64 and the token int32 of the best score, and the largest logit float32.

    The last is None if it was not asked for.
    """

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

    ``rows`` (n,) int32 on the device, a negative one is padding, and ``positions`` (n,) int64 of their last tokens, or
    ``noise_keys`` (n, 2) int32 instead of these and of the seeds.  ``counts`` where rows may be penalised.  ``maxima``
    (n,) float32, the largest of all ranks' logits, where rows may have min_p.  ``ranked_below`` is the vocabulary's
    size if rows may have a top_k below it: another kernel draws those, and their results here mean nothing.
    ``advanced`` are the tables in which the tokens then follow (``decode_inputs.advance_decodes``).
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
        logits,
        rows,
        positions,
        tables.floats,
        tables.top_k,
        tables.seeds,
        noise_keys,
        counts.output_counts if counts else None,
        counts.in_prompt if counts else None,
        maxima,
        tables.arrivals,
        parts,
        peaks,
        keys,
        token_ids,
        found,
        advanced.token_ids if advanced else None,
        advanced.num_computed if advanced else None,
        logits.stride(0),
        counts.output_counts.stride(0) if counts else 0,
        num_ids,
        first_id,
        ranked_below or 0,
        advanced.token_ids.stride(0) if advanced else 0,
        NUM_FLOATS=NUM_FLOATS,
        HAS_KEYS=noise_keys is not None,
        PENALISES=counts is not None,
        HAS_MAXIMA=maxima is not None,
        FINDS_MAXIMA=finds_maxima,
        SKIPS_RANKED=ranked_below is not None,
        ADVANCES=advanced is not None,
        BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK=_BLOCK,
        num_warps=8,
        **dependent_launch(logits.device),
        **LAUNCH_OPTIONS,
    )
    return BestTokens(keys, token_ids, found)


@triton.jit  # type: ignore[untyped-decorator]
def row_of(rows, floats, top_ks, place, NUM_FLOATS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The row of the batch at ``place`` (64 bits) of the step, its temperature and its top_k.

    A padding row is greedy: row 0, for which it stands, may be one that many programs would have to search.
    """
    row = tl.load(rows + place).to(tl.int64)
    is_row = row >= 0
    row = tl.maximum(row, 0)
    return row, tl.load(floats + row * NUM_FLOATS, mask=is_row, other=0.0), tl.load(top_ks + row)


@triton.jit
def drawn_scores(scores, token_ids, temperature, word_1, word_2):  # type: ignore[no-untyped-def]
    """The scores of rows with a temperature over it, with noise; those of greedy rows as they are."""
    draws = temperature > 0
    scaled = tl.math.div_rn(scores, tl.where(draws, temperature, 1.0))
    return tl.where(draws, gumbel_noise(token_ids, word_1, word_2) + scaled, scores)


@triton.jit  # type: ignore[untyped-decorator]
def settle_rows(  # type: ignore[no-untyped-def]
    best,
    place,
    exists,
    rows,
    keys_out,
    tokens_out,
    token_table,
    num_computed,
    token_stride,
    ADVANCES: tl.constexpr,  # noqa: N803
):
    """Store the ``best`` keys of the rows at ``place``, one or a block, with their tokens; with ADVANCES the tokens
    follow in the rows' tables."""
    tl.store(keys_out + place, best, mask=exists)
    tl.store(tokens_out + place, id_of(best), mask=exists)
    if ADVANCES:
        own_row = tl.load(rows + place, mask=exists, other=-1).to(tl.int64)  # padding is -1, and not row 0
        advance_rows(token_table, num_computed, token_stride, own_row, id_of(best))


@triton.jit
def id_of(key):  # type: ignore[no-untyped-def]
    """The token id int32 of a rank key."""
    return ((-key) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def value_of(ordered):  # type: ignore[no-untyped-def]
    """The float32 of ordered bits."""
    return ordered_bits(ordered.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def mix64(x):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer of a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position):  # type: ignore[no-untyped-def]
    """The two 31-bit words (int32) of a row's int64 ``seed`` and the position that it samples."""
    counter = (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    key = mix64(mix64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15) + counter)
    return (key & 0x7FFFFFFF).to(tl.int32), ((key >> 32) & 0x7FFFFFFF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def noise_words(  # type: ignore[no-untyped-def]
    noise_keys,
    seeds,
    positions,
    place,
    row,
    HAS_KEYS: tl.constexpr,  # noqa: N803
):
    """The two words of the noise of a row's next token: of the step's ``noise_keys``, or from seed and position."""
    if HAS_KEYS:
        word_1, word_2 = tl.load(noise_keys + 2 * place), tl.load(noise_keys + 2 * place + 1)
    else:
        word_1, word_2 = noise_key(tl.load(seeds + row), tl.load(positions + place) + 1)
    return word_1, word_2


@triton.jit
def hash_tokens(token_ids, word_1, word_2):  # type: ignore[no-untyped-def]
    """31 hashed bits per int32 token id."""
    x = token_ids ^ word_1
    x = ((x ^ (x >> 16)) * _M1 + word_2) & _MASK_31
    x = ((x ^ (x >> 15)) * _M2) & _MASK_31
    return x ^ (x >> 16)


@triton.jit
def gumbel_noise(token_ids, word_1, word_2):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise, float32."""
    minus_v = hash_tokens(token_ids, word_1, word_2).to(tl.float32) * -_SCALE - _HALF_STEP
    if HAS_LIBDEVICE:
        noise = -libdevice.log(-libdevice.log1p(minus_v))
    else:
        # Kahan's log1p: exact where 1 + x rounds to 1.
        u = 1.0 + minus_v
        below_one = tl.where(u == 1.0, 0.5, u)
        log1p = tl.where(u == 1.0, minus_v, tl.log(below_one) * (minus_v / (below_one - 1.0)))
        noise = -tl.log(-log1p)
    return noise


@triton.jit
def exponential(x):  # type: ignore[no-untyped-def]
    """exp of a float32, as the twin computes it."""
    return libdevice.exp(x) if HAS_LIBDEVICE else tl.exp(x)


@triton.jit
def ordered_bits(values):  # type: ignore[no-untyped-def]
    """float32 -> int32 of the same order; its own inverse on the bits."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack_keys(values, token_ids):  # type: ignore[no-untyped-def]
    """Rank keys int64."""
    return (ordered_bits(values).to(tl.int64) << 32) - token_ids


@triton.jit
def pack_scores(scores, token_ids):  # type: ignore[no-untyped-def]
    """Rank keys that treat zeros of both signs, and every NaN, alike, as ``ranking.best_keys`` does."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    keys = pack_keys(scores, token_ids)
    return tl.where(scores != scores, (tl.full(keys.shape, 0x7FC00000, tl.int64) << 32) - token_ids, keys)
