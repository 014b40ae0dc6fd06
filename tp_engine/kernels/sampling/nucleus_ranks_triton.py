"""Draw rows with top_p and without top_k from slices of the vocabulary, with two exchanges of fixed size.

What top_p and min_p keep is an upper set of the order of ranks, and the best noisy score of that set is drawn.  So only
tokens can be drawn above which none has a better score: the row's *front*::

    noisy score   |  x
                  |      x        .            x: the front, from its last rank (the best score of all) to rank 0
                  |   .     . x
                  |  .   .   .   .   x
                  +-------------------
                    last rank ... rank 0

    front_of_slice (i, j)   the front of each block of tokens; the last program of row i joins them    -> exchanged
    merge_fronts (i)        the row's front from those of all ranks
    weigh_front (i, j)      the weight of this rank's tokens above each token of the front, and of all -> exchanged
    choose (i)              the token of the last rank that is kept: ``nucleus_triton`` finds the same, step by step

If noise alone decides, the front of n tokens has on average 1 + 1/2 + ... + 1/n of them, 13 of 256,000 (more than 31 in
one row of 10**5, more than WIDTH in one of 10**22); the flatter the logits, the nearer to that.  Of a longer front the
best scores and the likeliest token are used.  Weights are integers, so sums are exact in any order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling.filter_triton import load_block
from tp_engine.kernels.sampling.nucleus_triton import is_likely, is_nucleus, weights_above
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    gumbel_noise,
    id_of,
    noise_words,
    pack_keys,
    pack_scores,
    row_of,
    value_of,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables

_BLOCK = 4096
WIDTH = 64  # the most tokens of a front


@jit
def nucleus_row(rows, floats, top_ks, place, vocab_size, NUM_FLOATS: tl.constexpr):
    """Whether these kernels draw the row at ``place`` of the step, its row of the batch, and its temperature."""
    row, temperature, top_k = row_of(rows, floats, top_ks, place, NUM_FLOATS)
    return is_nucleus(temperature, tl.load(floats + row * NUM_FLOATS + 1), top_k, vocab_size), row, temperature


@jit
def noisy_keys(values, token_ids, exists, temperature, word_1, word_2):
    """Rank keys of the noisy scores of tokens; the lowest key where none exists."""
    scores = gumbel_noise(token_ids, word_1, word_2) + tl.math.div_rn(values, temperature)
    return tl.where(exists, pack_scores(scores, token_ids), LOWEST_KEY)


@jit
def front_of(keys, noisy, WIDTH: tl.constexpr):
    """Rank keys (WIDTH,) of the front of tokens with the rank ``keys`` and the ``noisy`` keys: the best score first,
    then ever higher ranks, then the lowest key.  If there are too many, the last place has the highest rank."""
    slot = tl.arange(0, WIDTH)
    front = tl.full((WIDTH,), LOWEST_KEY, tl.int64)
    place = tl.full((), 0, tl.int32)
    best = tl.max(noisy, axis=0)
    while best != LOWEST_KEY:
        found = tl.max(tl.where(noisy == best, keys, LOWEST_KEY), axis=0)
        front = tl.where(slot == place, found, front)
        place = tl.minimum(place + 1, WIDTH - 1)
        best = tl.max(tl.where(keys > found, noisy, LOWEST_KEY), axis=0)
    return front


@jit
def front_of_keys(keys, temperature, word_1, word_2, WIDTH: tl.constexpr):
    """``front_of`` tokens of which only the rank ``keys`` are known; the lowest key stands for no token."""
    token_ids = id_of(keys)
    values = value_of(((keys + token_ids) >> 32).to(tl.int32))
    return front_of(keys, noisy_keys(values, token_ids, keys != LOWEST_KEY, temperature, word_1, word_2), WIDTH)


@jit
def front_of_slice_kernel(
    logits, rows, positions, floats, top_ks, seeds, arrivals, parts, fronts, logits_stride, num_ids, first_id,
    vocab_size,
    NUM_FLOATS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of a row; the last one joins the CHUNKS (rounded up) fronts of its row.

    Rows that are not drawn here keep what ``fronts`` has.
    """
    place = begin_row(PDL)
    draws, row, temperature = nucleus_row(rows, floats, top_ks, place, vocab_size, NUM_FLOATS)
    if draws:
        word_1, word_2 = noise_words(None, seeds, positions, place, row, False)
        num_chunks, chunk = tl.num_programs(1), tl.program_id(1)
        column, inside, values, _ordered = load_block(logits + place * logits_stride, chunk * BLOCK, num_ids, BLOCK)
        token_ids = column + first_id
        keys = tl.where(inside, pack_keys(values, token_ids), LOWEST_KEY)
        front = front_of(keys, noisy_keys(values, token_ids, inside, temperature, word_1, word_2), WIDTH)
        slot = tl.arange(0, WIDTH)
        tl.store(parts + (place * num_chunks + chunk) * WIDTH + slot, front)
        if arrives_last(arrivals + place, num_chunks):
            every = tl.arange(0, CHUNKS * WIDTH)
            own = parts + place * num_chunks * WIDTH + every
            found = tl.load(own, mask=every < num_chunks * WIDTH, other=LOWEST_KEY, cache_modifier=".cg")
            tl.store(fronts + place * WIDTH + slot, front_of_keys(found, temperature, word_1, word_2, WIDTH))


@jit
def merge_fronts_kernel(
    gathered, rows, positions, floats, top_ks, seeds, front_out, sums, vocab_size,
    NUM_FLOATS: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a row's front from those of WORLD_SIZE ranks (RANKS, rounded up), and zeros in its ``sums``."""
    place = begin_row(PDL)
    draws, row, temperature = nucleus_row(rows, floats, top_ks, place, vocab_size, NUM_FLOATS)
    slot = tl.arange(0, WIDTH)
    tl.store(sums + place * (WIDTH + 1) + slot, tl.full((WIDTH,), 0, tl.int64))
    tl.store(sums + place * (WIDTH + 1) + WIDTH, tl.full((), 0, tl.int64))
    if draws:
        word_1, word_2 = noise_words(None, seeds, positions, place, row, False)
        every = tl.arange(0, RANKS * WIDTH)
        rank = every // WIDTH
        own = gathered + (rank * tl.num_programs(0) + place) * WIDTH + every % WIDTH
        found = tl.load(own, mask=rank < WORLD_SIZE, other=LOWEST_KEY)
        tl.store(front_out + place * WIDTH + slot, front_of_keys(found, temperature, word_1, word_2, WIDTH))


@jit
def weigh_front_kernel(
    logits, rows, floats, top_ks, front, sums, logits_stride, num_ids, first_id, vocab_size,
    NUM_FLOATS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of a row; adds up their weight above each token of the front, and their total."""
    place = begin_row(PDL)
    draws, _row, temperature = nucleus_row(rows, floats, top_ks, place, vocab_size, NUM_FLOATS)
    if draws:
        keys = tl.load(front + place * WIDTH + tl.arange(0, WIDTH))
        num_keys = tl.sum((keys != LOWEST_KEY).to(tl.int32), axis=0)
        highest = tl.math.div_rn(highest_value(keys), temperature)
        start = tl.program_id(1) * BLOCK
        column, inside, values, _ordered = load_block(logits + place * logits_stride, start, num_ids, BLOCK)
        own = sums + place * (WIDTH + 1)
        for index in range(num_keys):
            key = tl.load(front + place * WIDTH + index)
            weights, above = weights_above(values, column + first_id, inside, key, temperature, highest)
            weight = tl.sum(above, axis=0)
            if weight > 0:
                tl.atomic_add(own + index, weight, sem="relaxed")
            if index == 0:
                tl.atomic_add(own + WIDTH, tl.sum(weights, axis=0), sem="relaxed")


@jit
def highest_value(keys):
    """The logit of the highest rank key."""
    key = tl.max(keys, axis=0)
    return value_of(((key + id_of(key)) >> 32).to(tl.int32))


@jit
def choose_kernel(
    front, gathered, rows, floats, top_ks, token_ids, vocab_size,
    NUM_FLOATS: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the token of one row, by the sums of all ranks."""
    place = begin_row(PDL)
    draws, row, temperature = nucleus_row(rows, floats, top_ks, place, vocab_size, NUM_FLOATS)
    if draws:
        slot, rank = tl.arange(0, WIDTH), tl.arange(0, RANKS)
        exists = rank < WORLD_SIZE
        of_ranks = gathered + (rank * tl.num_programs(0) + place) * (WIDTH + 1)
        total = tl.sum(tl.load(of_ranks + WIDTH, mask=exists, other=0), axis=0)
        above = tl.sum(tl.load(of_ranks[:, None] + slot[None, :], mask=exists[:, None], other=0), axis=0)
        top_p, log_min_p = tl.load(floats + row * NUM_FLOATS + 1), tl.load(floats + row * NUM_FLOATS + 2)
        target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        keys = tl.load(front + place * WIDTH + slot)
        values = value_of(((keys + id_of(keys)) >> 32).to(tl.int32))
        is_kept = (above < target) & is_likely(values, highest_value(keys), temperature, log_min_p)
        chosen = tl.min(tl.where(is_kept & (keys != LOWEST_KEY), slot, WIDTH), axis=0)
        if chosen < WIDTH:  # else the logits are NaN
            tl.store(token_ids + place, id_of(tl.max(tl.where(slot == chosen, keys, LOWEST_KEY), axis=0)))


def front_share_triton(
    share: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    *,
    first_id: int,
    vocab_size: int,
) -> None:
    """Write this rank's fronts to ``share`` (n, WIDTH) int64, for the rows with top_p and without top_k.

    ``logits`` (n, num_ids) are the rank's slice, whose column 0 is token ``first_id``; it may have no columns.  Other
    arguments as for ``best_tokens_triton``.
    """
    (num_rows, num_ids), num_chunks = logits.shape, triton.cdiv(logits.shape[1], _BLOCK)
    if not num_ids:
        return
    parts = torch.empty((num_rows, num_chunks, WIDTH), dtype=torch.int64, device=share.device)
    front_of_slice_kernel[(num_rows, num_chunks)](
        logits, rows, positions, tables.floats, tables.top_k, tables.seeds, tables.arrivals, parts, share,
        logits.stride(0), num_ids, first_id, vocab_size, CHUNKS=triton.next_power_of_2(num_chunks), BLOCK=_BLOCK,
        **_options(share.device),
    )  # fmt: skip


def weigh_fronts_triton(
    shares: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    *,
    first_id: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' fronts (n, WIDTH) and this rank's weights (n, WIDTH + 1), int64, from the ranks' ``shares`` (world
    size, n, WIDTH).  Other arguments as for ``front_share_triton``."""
    world_size, num_rows, _ = shares.shape
    num_ids, options = logits.shape[1], _options(shares.device)
    front = torch.empty((num_rows, WIDTH), dtype=torch.int64, device=shares.device)
    sums = torch.empty((num_rows, WIDTH + 1), dtype=torch.int64, device=shares.device)
    merge_fronts_kernel[(num_rows,)](
        shares, rows, positions, tables.floats, tables.top_k, tables.seeds, front, sums, vocab_size,
        **_of_ranks(world_size), **options,
    )  # fmt: skip
    if num_ids:
        weigh_front_kernel[(num_rows, triton.cdiv(num_ids, _BLOCK))](
            logits, rows, tables.floats, tables.top_k, front, sums, logits.stride(0), num_ids, first_id, vocab_size,
            BLOCK=_BLOCK, **options,
        )  # fmt: skip
    return front, sums


def choose_of_fronts_triton(
    token_ids: torch.Tensor,
    front: torch.Tensor,
    sums: torch.Tensor,
    rows: torch.Tensor,
    tables: SamplingTables,
    *,
    vocab_size: int,
) -> None:
    """Write the draws of rows with top_p and without top_k to ``token_ids`` (n,) int32, from their ``front`` and the
    ranks' ``sums`` (world size, n, WIDTH + 1)."""
    choose_kernel[(len(rows),)](
        front, sums, rows, tables.floats, tables.top_k, token_ids, vocab_size, **_of_ranks(len(sums)),
        **_options(sums.device),
    )  # fmt: skip


def _options(device: torch.device) -> dict[str, Any]:
    return {"NUM_FLOATS": NUM_FLOATS, "WIDTH": WIDTH, "num_warps": 8, **LAUNCH_OPTIONS, **dependent_launch(device)}


def _of_ranks(world_size: int) -> dict[str, int]:
    return {"WORLD_SIZE": world_size, "RANKS": triton.next_power_of_2(world_size)}
