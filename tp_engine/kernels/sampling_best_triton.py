"""The best token of every row after penalties, temperature and noise, as one pass over the logits.

The Triton twin of ``sampling``'s GREEDY and ANY ways (``penalties``, ``filters.noisy_scores``, ``ranking.best_keys``)::

    program (i, j): columns [j * BLOCK, (j + 1) * BLOCK) of step row i  ->  one rank key;  torch's amax merges them

Parameters come from tables by row of the batch, so a captured launch serves any rows.

Below is what the other sampling kernels use too: the noise of ``sampling/noise.py`` and the rank keys of
``sampling/ranking.py``.  The hash gives the same bits as its PyTorch twin.  So does the noise on CUDA, where both take
their logarithms from libdevice and round every operation (launch with ``enable_fp_fusion=False``); Triton's interpreter
has no libdevice, and its noise may differ in the last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.sampling_tables import NUM_FLOATS, CountTables, SamplingTables

LAUNCH_OPTIONS = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where the twin rounds twice

HAS_LIBDEVICE = tl.constexpr(not knobs.runtime.interpret)
LOWEST_KEY = tl.constexpr(-(2**63))
_MASK_31 = tl.constexpr(0x7FFFFFFF)
_M1 = tl.constexpr(0x7FEB352D)
_M2 = tl.constexpr(0x846CA68B - (1 << 32))
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))
_HALF_STEP = tl.constexpr(2.0**-32)
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

    With SKIPS_FILTERED, rows with top_k or top_p have the lowest key: another kernel draws them.
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
    ``filtered_below`` is the vocabulary's size if rows may have a top_k below it, or top_p: another kernel draws those,
    and their keys here mean nothing.
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


@triton.jit
def is_filtered(parameters, top_k, vocab_size):  # type: ignore[no-untyped-def]
    """Whether a row with these parameters has top_k or top_p, and is not greedy."""
    return (tl.load(parameters) > 0.0) & ((top_k < vocab_size) | (tl.load(parameters + 1) < 1.0))


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
