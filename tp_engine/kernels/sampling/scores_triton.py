"""What the sampling kernels share: a row's parameters, its noise, and the rank keys of scores.

Noise and keys are those of ``sampling/noise.py`` and ``sampling/ranking.py``.  The hash gives the same bits as its
PyTorch twin, and so does the noise on CUDA, where both take their logarithms from libdevice and round every operation
(launch with ``LAUNCH_OPTIONS``).  Triton's interpreter has no libdevice, so its noise may differ in the last bits.
"""

import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from tp_engine.kernels.jit import jit

LAUNCH_OPTIONS = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where the twin rounds twice

HAS_LIBDEVICE = tl.constexpr(not knobs.runtime.interpret)
LOWEST_KEY = tl.constexpr(-(2**63))
MIN_INT32 = tl.constexpr(-(2**31))
_MASK_31 = tl.constexpr(0x7FFFFFFF)
_M1 = tl.constexpr(0x7FEB352D)
_M2 = tl.constexpr(0x846CA68B - (1 << 32))
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))
_HALF_STEP = tl.constexpr(2.0**-32)


@jit
def row_of(rows, floats, top_ks, place, NUM_FLOATS: tl.constexpr):
    """The row of the batch at ``place`` (64 bits) of the step, its temperature, and its top_k.

    A padding row stands for row 0, but is greedy, so that no program searches for its token.
    """
    row = tl.load(rows + place).to(tl.int64)
    is_row = row >= 0
    row = tl.maximum(row, 0)
    return row, tl.load(floats + row * NUM_FLOATS, mask=is_row, other=0.0), tl.load(top_ks + row)


@jit
def drawn_scores(scores, token_ids, temperature, word_1, word_2):
    """The scores of rows with a temperature, divided by it and with noise; those of greedy rows as they are."""
    draws = temperature > 0
    scaled = tl.math.div_rn(scores, tl.where(draws, temperature, 1.0))
    return tl.where(draws, gumbel_noise(token_ids, word_1, word_2) + scaled, scores)


@jit
def id_of(key):
    """The token id int32 of a rank key."""
    return ((-key) & 0xFFFFFFFF).to(tl.int32)


@jit
def value_of(ordered):
    """The float32 value of ordered bits."""
    return ordered_bits(ordered.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)


@jit
def mix64(x):
    """SplitMix64's finalizer of a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def noise_key(seed, position):
    """The two 31-bit words (int32) of a row's int64 ``seed`` and the ``position`` that it samples."""
    counter = (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    key = mix64(mix64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15) + counter)
    return (key & 0x7FFFFFFF).to(tl.int32), ((key >> 32) & 0x7FFFFFFF).to(tl.int32)


@jit
def noise_words(noise_keys, seeds, positions, place, row, HAS_KEYS: tl.constexpr):
    """The two words of the noise of a row's next token: the step's ``noise_keys``, or from seed and position."""
    if HAS_KEYS:
        word_1, word_2 = tl.load(noise_keys + 2 * place), tl.load(noise_keys + 2 * place + 1)
    else:
        word_1, word_2 = noise_key(tl.load(seeds + row), tl.load(positions + place) + 1)
    return word_1, word_2


@jit
def hash_tokens(token_ids, word_1, word_2):
    """31 hashed bits per int32 token id."""
    x = token_ids ^ word_1
    x = ((x ^ (x >> 16)) * _M1 + word_2) & _MASK_31
    x = ((x ^ (x >> 15)) * _M2) & _MASK_31
    return x ^ (x >> 16)


@jit
def gumbel_noise(token_ids, word_1, word_2):
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


@jit
def exponential(x):
    """exp of a float32, as the twin computes it."""
    return libdevice.exp(x) if HAS_LIBDEVICE else tl.exp(x)


@jit
def ordered_bits(values):
    """float32 -> int32 of the same order; its own inverse on the bits."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def pack_keys(values, token_ids):
    """Rank keys int64."""
    return (ordered_bits(values).to(tl.int64) << 32) - token_ids


@jit
def pack_scores(scores, token_ids):
    """Rank keys in which zeros of both signs are equal, and so are all NaN, as in ``ranking.best_keys``."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    keys = pack_keys(scores, token_ids)
    return tl.where(scores != scores, (tl.full(keys.shape, 0x7FC00000, tl.int64) << 32) - token_ids, keys)
