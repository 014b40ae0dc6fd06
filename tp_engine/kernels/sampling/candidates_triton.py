"""Draw rows with top_k from few candidates, which many programs find in each row.

::

    logits (n, vocab)   | chunk 0 | chunk 1 | chunk 2 | ...       each of 64 groups of 64
    survey (i, c)       the largest value of each group
    choose_cut (i)      a value that is at most the threshold: the k-th largest of the groups' values
    collect (i, c)      values of at least that cut, up to 64 candidates of a chunk
    draw (i)            thresholds and the token from row i's candidates alone, all of them in registers

A threshold found among the candidates is the row's, unless a chunk had too many of them, as with a large top_k.  Then
the program searches all logits (``filter_triton``).  Both ways add up the same integers, so the tokens are the same.
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling.filter_triton import draw, load_block, narrow, search_registers
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    MIN_INT32,
    gumbel_noise,
    id_of,
    noise_words,
    ordered_bits,
    pack_scores,
    row_of,
    value_of,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables

_CHUNK = 4096
_GROUPS = 64  # of a chunk
_KEPT = 64  # of a chunk
_BLOCK = 4096  # of a search through all logits
NO_TOP_K = tl.constexpr(2**31 - 1)


@jit
def begin_ranked_row(rows, floats, top_ks, NUM_FLOATS: tl.constexpr, PDL: tl.constexpr):
    """The beginning of each of these kernels: the program's row of the step, row of the batch, and top_k, NO_TOP_K if
    the row is greedy, as padding is.
    """
    place = begin_row(PDL)
    row, temperature, top_k = row_of(rows, floats, top_ks, place, NUM_FLOATS)
    return place, row, tl.where(temperature > 0.0, top_k, NO_TOP_K)


@jit
def survey_kernel(
    logits, rows, floats, top_ks, group_maxima, logits_stride, num_ids,
    NUM_FLOATS: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of a row."""
    place, _, top_k = begin_ranked_row(rows, floats, top_ks, NUM_FLOATS, PDL)
    chunk = tl.program_id(1)
    if top_k < num_ids:
        group, member = tl.arange(0, GROUPS), tl.arange(0, CHUNK // GROUPS)
        column = chunk * CHUNK + group[:, None] * (CHUNK // GROUPS) + member[None, :]
        inside = column < num_ids
        values = tl.load(logits + place * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
        maxima = tl.max(tl.where(inside, ordered_bits(values), MIN_INT32), axis=1)
        place_of_chunk = place * tl.num_programs(1) + chunk
        tl.store(group_maxima + place_of_chunk * GROUPS + group, maxima)


@jit
def choose_cut_kernel(
    rows, floats, top_ks, group_maxima, cuts, maxima, num_ids, num_chunks,
    NUM_FLOATS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row's cut (ordered bits) and its largest value.

    At least k values reach the k-th largest of the groups' maxima.
    """
    place, _, top_k = begin_ranked_row(rows, floats, top_ks, NUM_FLOATS, PDL)
    if top_k < num_ids:
        chunk, group = tl.arange(0, CHUNKS), tl.arange(0, GROUPS)
        exists = (chunk < num_chunks)[:, None] & (group >= 0)[None, :]
        own = (place * num_chunks + chunk)[:, None] * GROUPS + group[None, :]
        groups = tl.load(group_maxima + own, mask=exists, other=MIN_INT32)
        every = tl.reshape(groups, (CHUNKS * GROUPS,))
        tl.store(cuts + place, search_registers(every, every > MIN_INT32, every, top_k.to(tl.int64), False))
        tl.store(maxima + place, value_of(tl.max(every, axis=0)))


@jit
def collect_candidates_kernel(
    logits, rows, floats, top_ks, cuts, values_out, columns_out, counts, logits_stride, num_ids,
    NUM_FLOATS: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of a row; it stores the first KEPT candidates, and the number of all of them."""
    place, _, top_k = begin_ranked_row(rows, floats, top_ks, NUM_FLOATS, PDL)
    chunk = tl.program_id(1)
    if top_k < num_ids:
        column, inside, values, ordered = load_block(logits + place * logits_stride, chunk * CHUNK, num_ids, CHUNK)
        place_of_chunk = place * tl.num_programs(1) + chunk
        kept = (inside & (ordered >= tl.load(cuts + place))).to(tl.int32)
        count = tl.sum(kept, axis=0)
        if count > 0:
            slot = tl.cumsum(kept, axis=0) - 1
            is_stored = (kept > 0) & (slot < KEPT)
            tl.store(values_out + place_of_chunk * KEPT + slot, values, mask=is_stored)
            tl.store(columns_out + place_of_chunk * KEPT + slot, column, mask=is_stored)
        tl.store(counts + place_of_chunk, count)


@jit
def keep_candidates(values, ordered, exists, threshold, num_equal, temperature, maximum, log_min_p):
    """Which candidates, in the order of their ids, ``narrow``'s threshold and min_p keep."""
    is_equal = (exists & (ordered == threshold)).to(tl.int64)
    kept = exists & ((ordered > threshold) | ((is_equal > 0) & (tl.cumsum(is_equal, axis=0) <= num_equal)))
    relative = tl.math.div_rn(values, temperature) - tl.math.div_rn(maximum, temperature)
    return kept & ((relative >= log_min_p) | (values == maximum))


@jit
def pick(values, token_ids, kept, temperature, word_1, word_2):
    """The kept token with the best noisy score."""
    scores = gumbel_noise(token_ids, word_1, word_2) + tl.math.div_rn(values, temperature)
    return id_of(tl.max(tl.where(kept, pack_scores(scores, token_ids), LOWEST_KEY), axis=0))


@jit
def draw_candidates_kernel(
    logits, maxima, rows, positions, floats, top_ks, seeds, noise_keys, values_in, columns_in, cuts, counts, token_ids,
    logits_stride, num_ids, num_chunks,
    NUM_FLOATS: tl.constexpr, HAS_KEYS: tl.constexpr, CHUNKS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row; CHUNKS is ``num_chunks``, rounded up to a power of two."""
    place, row, top_k = begin_ranked_row(rows, floats, top_ks, NUM_FLOATS, PDL)
    parameters = floats + row * NUM_FLOATS
    if top_k < num_ids:
        word_1, word_2 = noise_words(noise_keys, seeds, positions, place, row, HAS_KEYS)
        temperature, top_p, log_min_p = tl.load(parameters), tl.load(parameters + 1), tl.load(parameters + 2)
        chunk = tl.arange(0, CHUNKS)
        most = tl.max(tl.load(counts + place * num_chunks + chunk, mask=chunk < num_chunks, other=0), axis=0)
        slot = tl.arange(0, CHUNKS * KEPT)
        place_of_chunk = place * num_chunks + slot // KEPT
        in_chunk = tl.load(counts + place_of_chunk, mask=slot < num_chunks * KEPT, other=0)
        exists = slot % KEPT < in_chunk
        column = tl.load(columns_in + place_of_chunk * KEPT + slot % KEPT, mask=exists, other=0)
        values = tl.load(values_in + place_of_chunk * KEPT + slot % KEPT, mask=exists, other=0.0)
        ordered = ordered_bits(values)
        maximum = tl.load(maxima + place)
        highest = tl.math.div_rn(maximum, temperature)
        # fmt: off
        threshold, num_equal, is_known = narrow(
            values, ordered, exists, top_k, top_p, temperature, highest, tl.load(cuts + place))
        # fmt: on
        if is_known & (most <= KEPT):
            kept = keep_candidates(values, ordered, exists, threshold, num_equal, temperature, maximum, log_min_p)
            tl.store(token_ids + place, pick(values, column, kept, temperature, word_1, word_2))
        else:
            drawn = draw(logits + place * logits_stride, num_ids, parameters, top_k, word_1, word_2, BLOCK)
            tl.store(token_ids + place, drawn)


def draw_ranked_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor | None,
    tables: SamplingTables,
    token_ids: torch.Tensor,
    *,
    noise_keys: torch.Tensor | None = None,
) -> None:
    """Draw the rows of ``logits`` (n, vocab) that have top_k, by it, top_p, min_p and noise.

    Only their places in ``token_ids`` (n,) int32 are written.  Other arguments as for ``best_tokens_triton``.
    """
    num_rows, num_ids = logits.shape
    assert logits.stride(1) == 1 and (positions is None) != (noise_keys is None), logits.stride()
    num_chunks = triton.cdiv(num_ids, _CHUNK)

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    groups = room(torch.int32, num_chunks, _GROUPS)
    cuts, maxima = room(torch.int32), room(torch.float32)
    values, columns = room(torch.float32, num_chunks, _KEPT), room(torch.int32, num_chunks, _KEPT)
    counts = room(torch.int32, num_chunks)
    sizes = {"NUM_FLOATS": NUM_FLOATS, "num_warps": 8, **LAUNCH_OPTIONS, **dependent_launch(logits.device)}
    padded = {"CHUNKS": triton.next_power_of_2(num_chunks)}
    survey_kernel[(num_rows, num_chunks)](
        logits, rows, tables.floats, tables.top_k, groups, logits.stride(0), num_ids, CHUNK=_CHUNK, GROUPS=_GROUPS,
        **sizes,
    )  # fmt: skip
    choose_cut_kernel[(num_rows,)](
        rows, tables.floats, tables.top_k, groups, cuts, maxima, num_ids, num_chunks, GROUPS=_GROUPS, **padded,
        **sizes,
    )  # fmt: skip
    collect_candidates_kernel[(num_rows, num_chunks)](
        logits, rows, tables.floats, tables.top_k, cuts, values, columns, counts, logits.stride(0), num_ids,
        CHUNK=_CHUNK, KEPT=_KEPT, **sizes,
    )  # fmt: skip
    draw_candidates_kernel[(num_rows,)](
        logits, maxima, rows, positions, tables.floats, tables.top_k, tables.seeds, noise_keys, values, columns, cuts,
        counts, token_ids, logits.stride(0), num_ids, num_chunks, HAS_KEYS=noise_keys is not None, KEPT=_KEPT,
        BLOCK=_BLOCK, **padded, **sizes | {"num_warps": 16},
    )  # fmt: skip
