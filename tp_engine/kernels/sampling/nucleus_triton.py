"""Draw rows with top_p and without top_k by rejection: no sort, no threshold, usually one more pass over the logits.

The nucleus is an *upper set* of the order of ranks (larger logits first, equal ones by lower id): with a token it has
all tokens that rank above it.  min_p keeps an upper set too, and so do both together.  Let c be the token with the best
noisy score of all *open* tokens.

::

    weight of the tokens above c < p * total, and c is likely enough    c is kept, so it is the best of those kept: the
                                                                        token that a search for thresholds would find
    else    c and everything below it are left out; only tokens above c stay open, and the next c is their best

    best_tokens (i, j)    c of each row, and its largest logit               best_triton
    weigh (i, j)          weights above c, and in the first round of all; the last program of row i decides
    best_above (i, j)     the next c, of open rows                           one more round by many programs
    weigh (i, j)
    finish (i)            all further rounds of an open row, by one program

With top_p = 0.95 about 3 % of the rows need a second round.  Weights are the twin's integers, whose sums are exact in
any order.
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling.best_triton import BestTokens
from tp_engine.kernels.sampling.filter_triton import fixed_weights, load_block
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    gumbel_noise,
    id_of,
    noise_words,
    pack_keys,
    pack_scores,
    row_of,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables

_BLOCK = 4096


@jit
def is_nucleus(temperature, top_p, top_k, num_ids):
    """Whether these kernels draw a row."""
    return (temperature > 0.0) & (top_p < 1.0) & (top_k >= num_ids)


@jit
def weights_above(values, column, inside, key, temperature, highest):
    """The weights (BLOCK,) int64 of the tokens that exist, and of those that rank above the rank key ``key``."""
    weights = tl.where(inside, fixed_weights(values, temperature, highest), 0)
    return weights, tl.where(pack_keys(values, column) > key, weights, 0)


@jit
def is_likely(value, maximum, temperature, log_min_p):
    """Whether min_p keeps a token with this logit."""
    relative = tl.math.div_rn(value, temperature) - tl.math.div_rn(maximum, temperature)
    return (relative >= log_min_p) | (value == maximum)


@jit
def weigh_kernel(
    logits, rows, floats, top_ks, token_ids, maxima, arrivals, sums, targets, bounds, logits_stride, num_ids,
    NUM_FLOATS: tl.constexpr, IS_FIRST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of a row.  ``bounds``: the rank key above which tokens are open, or the lowest key."""
    place = begin_row(PDL)
    row, temperature, top_k = row_of(rows, floats, top_ks, place, NUM_FLOATS)
    top_p = tl.load(floats + row * NUM_FLOATS + 1)
    if is_nucleus(temperature, top_p, top_k, num_ids):
        is_open = True
        if not IS_FIRST:
            is_open = tl.load(bounds + place) != LOWEST_KEY
        if is_open:
            num_chunks, chunk = tl.num_programs(1), tl.program_id(1)
            own = logits + place * logits_stride
            candidate = tl.load(token_ids + place)
            value = tl.load(own + candidate).to(tl.float32)
            key, maximum = pack_keys(value, candidate), tl.load(maxima + place)
            column, inside, values, _ = load_block(own, chunk * BLOCK, num_ids, BLOCK)
            highest = tl.math.div_rn(maximum, temperature)
            weights, above = weights_above(values, column, inside, key, temperature, highest)
            part = sums + (place * num_chunks + chunk) * 2
            tl.store(part, tl.sum(above, axis=0))
            if IS_FIRST:
                tl.store(part + 1, tl.sum(weights, axis=0))
            if arrives_last(arrivals + place, num_chunks):
                every = tl.arange(0, CHUNKS)
                parts = sums + (place * num_chunks + every) * 2
                exists = every < num_chunks
                weight_above = tl.sum(tl.load(parts, mask=exists, other=0, cache_modifier=".cg"), axis=0)
                if IS_FIRST:
                    total = tl.sum(tl.load(parts + 1, mask=exists, other=0, cache_modifier=".cg"), axis=0)
                    target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                    tl.store(targets + place, target)
                else:
                    target = tl.load(targets + place)
                log_min_p = tl.load(floats + row * NUM_FLOATS + 2)
                is_kept = (weight_above < target) & is_likely(value, maximum, temperature, log_min_p)
                tl.store(bounds + place, tl.where(is_kept, LOWEST_KEY, key))
    elif IS_FIRST:
        tl.store(bounds + place, tl.full((), LOWEST_KEY, tl.int64))


@jit
def best_above_kernel(
    logits, rows, positions, floats, top_ks, seeds, noise_keys, arrivals, bounds, parts, token_ids, logits_stride,
    num_ids,
    NUM_FLOATS: tl.constexpr, HAS_KEYS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of an open row; the last one of the row writes its next candidate."""
    place = begin_row(PDL)
    bound = tl.load(bounds + place)
    if bound != LOWEST_KEY:
        row, temperature, _ = row_of(rows, floats, top_ks, place, NUM_FLOATS)
        word_1, word_2 = noise_words(noise_keys, seeds, positions, place, row, HAS_KEYS)
        num_chunks, chunk = tl.num_programs(1), tl.program_id(1)
        best = best_above(
            logits + place * logits_stride, chunk * BLOCK, num_ids, bound, temperature, word_1, word_2, BLOCK
        )
        tl.store(parts + place * num_chunks + chunk, tl.max(best, axis=0))
        if arrives_last(arrivals + place, num_chunks):
            every = tl.arange(0, CHUNKS)
            of_chunks = parts + place * num_chunks + every
            found = tl.max(tl.load(of_chunks, mask=every < num_chunks, other=LOWEST_KEY, cache_modifier=".cg"), axis=0)
            if found != LOWEST_KEY:
                tl.store(token_ids + place, id_of(found))
            else:  # the logits are NaN; finish ends it
                tl.store(bounds + place, tl.full((), LOWEST_KEY, tl.int64))


@jit
def best_above(logits, start, num_ids, bound, temperature, word_1, word_2, BLOCK: tl.constexpr):
    """Noisy rank keys (BLOCK,) of the tokens from ``start`` on; the lowest key for those that are not open."""
    column, inside, values, _ = load_block(logits, start, num_ids, BLOCK)
    scores = gumbel_noise(column, word_1, word_2) + tl.math.div_rn(values, temperature)
    is_open = inside & (pack_keys(values, column) > bound)
    return tl.where(is_open, pack_scores(scores, column), LOWEST_KEY)


@jit
def finish_nucleus_kernel(
    logits, rows, positions, floats, top_ks, seeds, noise_keys, maxima, targets, bounds, token_ids, logits_stride,
    num_ids,
    NUM_FLOATS: tl.constexpr, HAS_KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row, until it has its token; each round leaves fewer tokens open."""
    place = begin_row(PDL)
    bound = tl.load(bounds + place)
    if bound != LOWEST_KEY:
        row, temperature, _ = row_of(rows, floats, top_ks, place, NUM_FLOATS)
        word_1, word_2 = noise_words(noise_keys, seeds, positions, place, row, HAS_KEYS)
        log_min_p, target = tl.load(floats + row * NUM_FLOATS + 2), tl.load(targets + place)
        maximum = tl.load(maxima + place)
        highest = tl.math.div_rn(maximum, temperature)
        logits += place * logits_stride
        while bound != LOWEST_KEY:
            best = tl.full((BLOCK,), LOWEST_KEY, tl.int64)
            for start in range(0, num_ids, BLOCK):
                best = tl.maximum(best, best_above(logits, start, num_ids, bound, temperature, word_1, word_2, BLOCK))
            found = tl.max(best, axis=0)
            bound = tl.full((), LOWEST_KEY, tl.int64)
            if found != LOWEST_KEY:  # else the logits are NaN
                candidate = id_of(found)
                tl.store(token_ids + place, candidate)
                value = tl.load(logits + candidate).to(tl.float32)
                key = pack_keys(value, candidate)
                above = tl.full((BLOCK,), 0, tl.int64)
                for start in range(0, num_ids, BLOCK):
                    column, inside, values, _ordered = load_block(logits, start, num_ids, BLOCK)
                    above += weights_above(values, column, inside, key, temperature, highest)[1]
                is_kept = (tl.sum(above, axis=0) < target) & is_likely(value, maximum, temperature, log_min_p)
                bound = tl.where(is_kept, LOWEST_KEY, key)


def draw_nucleus_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor | None,
    tables: SamplingTables,
    best: BestTokens,
    *,
    noise_keys: torch.Tensor | None = None,
) -> None:
    """Replace the ``best`` tokens of the rows of ``logits`` (n, vocab) that have top_p and no top_k by their draws.

    ``best`` must have the maxima.  Other arguments as for ``best_tokens_triton``.
    """
    num_rows, num_ids = logits.shape
    assert logits.stride(1) == 1 and best.maxima is not None
    num_chunks, device = triton.cdiv(num_ids, _BLOCK), logits.device
    sums = torch.empty((num_rows, num_chunks, 2), dtype=torch.int64, device=device)
    targets, bounds = torch.empty((2, num_rows + num_rows % 2), dtype=torch.int64, device=device).unbind()
    sizes = {"NUM_FLOATS": NUM_FLOATS, "BLOCK": _BLOCK, **LAUNCH_OPTIONS, **dependent_launch(device)}
    wide = {**sizes, "CHUNKS": triton.next_power_of_2(num_chunks), "num_warps": 8}

    def weigh(*, is_first: bool) -> None:
        weigh_kernel[(num_rows, num_chunks)](
            logits, rows, tables.floats, tables.top_k, best.token_ids, best.maxima, tables.arrivals, sums, targets,
            bounds, logits.stride(0), num_ids, IS_FIRST=is_first, **wide,
        )  # fmt: skip

    drawn = {"HAS_KEYS": noise_keys is not None}
    weigh(is_first=True)
    best_above_kernel[(num_rows, num_chunks)](
        logits, rows, positions, tables.floats, tables.top_k, tables.seeds, noise_keys, tables.arrivals, bounds, sums,
        best.token_ids, logits.stride(0), num_ids, **drawn, **wide,
    )  # fmt: skip
    weigh(is_first=False)
    finish_nucleus_kernel[(num_rows,)](
        logits, rows, positions, tables.floats, tables.top_k, tables.seeds, noise_keys, best.maxima, targets, bounds,
        best.token_ids, logits.stride(0), num_ids, **drawn, **sizes, num_warps=16,
    )  # fmt: skip
