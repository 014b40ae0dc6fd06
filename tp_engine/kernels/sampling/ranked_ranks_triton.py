"""Draw rows with top_k from the candidates of all ranks, gathered by one exchange.

::

    top_keys (i)          the largest top_k of this rank's slice, in the order of their ids (filter_triton), exchanged
    draw_of_shares (i)    top_k, top_p and min_p over the ranks' candidates of row i, and its token, all in registers

Slices lie in the order of ranks, so the candidates of all ranks lie in the order of their ids, as those of one rank's
chunks do in ``candidates_triton``; both draw alike.
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling.candidates_triton import begin_ranked_row, keep_candidates, pick
from tp_engine.kernels.sampling.filter_triton import narrow
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    MIN_INT32,
    id_of,
    noise_words,
    ordered_bits,
    value_of,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables


@jit
def draw_of_shares_kernel(
    gathered, rows, positions, floats, top_ks, seeds, token_ids, vocab_size,
    NUM_FLOATS: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row, from WIDTH keys of each of WORLD_SIZE ranks (RANKS, rounded up)."""
    place, row, top_k = begin_ranked_row(rows, floats, top_ks, NUM_FLOATS, PDL)
    if top_k < vocab_size:
        word_1, word_2 = noise_words(None, seeds, positions, place, row, False)
        parameters = floats + row * NUM_FLOATS
        temperature, top_p, log_min_p = tl.load(parameters), tl.load(parameters + 1), tl.load(parameters + 2)
        every = tl.arange(0, RANKS * WIDTH)
        rank = every // WIDTH
        own = gathered + (rank * tl.num_programs(0) + place) * WIDTH + every % WIDTH
        keys = tl.load(own, mask=rank < WORLD_SIZE, other=LOWEST_KEY)
        exists = keys != LOWEST_KEY
        column = id_of(keys)
        values = value_of(((keys + column) >> 32).to(tl.int32))
        ordered = ordered_bits(values)
        maximum = value_of(tl.max(tl.where(exists, ordered, MIN_INT32), axis=0))
        highest = tl.math.div_rn(maximum, temperature)
        threshold, num_equal, _ = narrow(values, ordered, exists, top_k, top_p, temperature, highest, MIN_INT32)
        kept = keep_candidates(values, ordered, exists, threshold, num_equal, temperature, maximum, log_min_p)
        tl.store(token_ids + place, pick(values, column, kept, temperature, word_1, word_2))


def draw_of_shares_triton(
    token_ids: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    vocab_size: int,
) -> torch.Tensor:
    """Write the draws of rows with top_k to ``token_ids`` (n,) int32, and return it; from the ranks' ``shares``
    (world size, n, c) int64, c a power of two: rank keys in the order of their ids.  No row has a top_k above c; those
    without one keep their tokens.  Other arguments as for ``best_tokens_triton``."""
    world_size, num_rows, width = shares.shape
    draw_of_shares_kernel[(num_rows,)](
        shares, rows, positions, tables.floats, tables.top_k, tables.seeds, token_ids, vocab_size,
        NUM_FLOATS=NUM_FLOATS, WORLD_SIZE=world_size, RANKS=triton.next_power_of_2(world_size), WIDTH=width,
        num_warps=4, **LAUNCH_OPTIONS, **dependent_launch(shares.device),
    )  # fmt: skip
    return token_ids
