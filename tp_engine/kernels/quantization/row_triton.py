"""One row times a quantised weight, as in a decode step of one request: it takes as long as reading the weight.

::

    weight (out, in), as words of 32 bits = [ rows of program 0 ]     program i: BLOCK_OUT whole rows
                                            [ rows of program 1 ]     gated: rows of gate, and as many of up
                                            ...
    word = 8 codes of 4 bits, or 4 of 8 bits, low bits first

At the speed of memory a GPU has time for four instructions per weight of 4 bits.  So the word's bits, shifted and
masked, are taken as a float32, which is too small by a power of two, and may be subnormal.  The powers are put right by
``x`` before the products and by the word's sum after them, and so are offsets::

    int4    code * 2^(p - 149) at bit p     x times 2^(74 - p), sum times 2^75, less (8 + zero / 16) * (sum of the x)
    int8    the same of code + 128          less (128 + zero) * (sum of the word's x)
    e4m3    value / 2^120                   both times 2^60
    e2m1    value / 2^126                   both times 2^63

Each word's sum is scaled in float32.  An e4m3 code of NaN counts as 480 here; a prompt's products show it.  The first
words are read before the kernel that makes ``x`` has ended (``dependent_launch_triton``).
"""

import torch
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.values_triton import load_scales, num_groups, weight_constants, weight_tensors
from tp_engine.kernels.quantization.weights import QuantisedWeight, values_per_byte
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div, round_up

_WORD_BYTES = 4
_MAX_BLOCK_WORDS, _MIN_BLOCK_WORDS, _BLOCK_ELEMENTS, _MIN_BLOCK_OUT = 1024, 32, 4096, 2
_TWO_TO_60, _TWO_TO_63, _TWO_TO_75 = (tl.constexpr(2.0**power) for power in (60, 63, 75))


@jit
def code_of_word(words, INDEX: tl.constexpr, CODES: tl.constexpr):
    """Code INDEX of each of ``words`` (uint32), as the float32 of the table above."""
    if CODES == 1:
        # Five codes fit below a float32's exponent.
        bits = (words & (15 << (4 * INDEX))) if INDEX < 5 else ((words >> 20) & (15 << (4 * INDEX - 20)))
    elif CODES == 2:
        unsigned = words ^ 0x80808080
        bits = (unsigned & (255 << (8 * INDEX))) if INDEX < 2 else ((unsigned >> 16) & (255 << (8 * INDEX - 16)))
    elif CODES == 3:
        bits = ((words << (24 - 8 * INDEX)).to(tl.int32, bitcast=True) >> 4).to(tl.uint32, bitcast=True) & 0x87F00000
    else:
        bits = ((words << (28 - 4 * INDEX)).to(tl.int32, bitcast=True) >> 6).to(tl.uint32, bitcast=True) & 0x81C00000
    return bits.to(tl.float32, bitcast=True)


@jit
def word_sums(
    words, x_place, scale_place, zero_place, mask, is_word,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr, FP8_UNITS: tl.constexpr,
):  # fmt: skip
    """``words`` (rows, words) times the columns of ``x`` from ``x_place`` (words,) on: each word's sum, scaled."""
    per_word: tl.constexpr = 8 if CODES == 1 or CODES == 4 else 4
    factor: tl.constexpr = _TWO_TO_60 if CODES == 3 else (_TWO_TO_63 if CODES == 4 else _TWO_TO_75)
    sums = tl.zeros(words.shape, tl.float32)
    sum_of_x = tl.zeros(x_place.shape, tl.float32)
    for index in tl.static_range(per_word):
        x = tl.load(x_place + index, mask=is_word, other=0.0).to(tl.float32)
        sum_of_x += x
        # int4 and int8: smaller where the code's bits are higher in the word.
        if CODES == 1:
            x *= factor / (2 << 4 * (index % 5))
        elif CODES == 2:
            x *= factor / (2 << 8 * (index % 2))
        else:
            x *= factor
        sums += code_of_word(words, index, CODES) * x[None, :]
    zero = 0.0
    if HAS_ZEROS:
        zero = tl.load(zero_place, mask=mask, other=0).to(tl.float32)
    if CODES == 1:
        sums = sums * factor - (zero * 0.0625 + 8.0) * sum_of_x[None, :]
    elif CODES == 2:
        sums = sums * factor - (zero + 128.0) * sum_of_x[None, :]
    else:
        sums *= factor
    if GROUPS > 1:
        sums *= load_scales(scale_place, mask, SCALES, FP8_UNITS)
    return sums


@jit
def quantised_row_kernel(
    x, codes, scales, zeros, factors, bias, out,
    CODES: tl.constexpr, SCALES: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_FACTORS: tl.constexpr, FP8_UNITS: tl.constexpr,
    OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_OUT of the OUT results; with GATED, the weight has twice as many rows, gate then up.

    ``codes`` are words of 32 bits.
    """
    let_next_begin(PDL)
    per_word: tl.constexpr = 8 if CODES == 1 or CODES == 4 else 4
    num_words: tl.constexpr = IN // per_word
    parts: tl.constexpr = 2 if GATED else 1
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = row < OUT
    word = tl.arange(0, BLOCK_WORDS)
    place = codes + row.to(tl.int64)[:, None] * num_words + word[None, :]
    mask = inside[:, None] & (word < num_words)[None, :]
    first = tl.load(place, mask=mask, other=0)
    first_up = first
    if GATED:
        first_up = tl.load(place + OUT * num_words, mask=mask, other=0)
    wait_for_previous(PDL)
    result = tl.zeros((BLOCK_OUT,), tl.float32)
    up = result
    for part in tl.static_range(parts):
        part_row = row + part * OUT
        sums = tl.zeros((BLOCK_OUT, BLOCK_WORDS), tl.float32)
        for start in tl.static_range(0, num_words, BLOCK_WORDS):
            is_word = start + word < num_words
            mask = inside[:, None] & is_word[None, :]
            if start == 0:
                words = first_up if part else first
            else:
                words = tl.load(place + (part * OUT * num_words + start), mask=mask, other=0)
            group = (start + word) * per_word // GROUP
            scale_place = scales
            zero_place = zeros
            if GROUPS > 1:
                scale_place = scales + (part_row // ROW_BLOCK * GROUPS)[:, None] + group[None, :]
            if HAS_ZEROS:
                zero_place = zeros + (part_row * GROUPS)[:, None] + group[None, :]
            x_place = x + (start + word) * per_word
            sums += word_sums(
                words, x_place, scale_place, zero_place, mask, is_word, CODES, SCALES, GROUPS, HAS_ZEROS, FP8_UNITS
            )
        total = tl.sum(sums, axis=1)
        if GROUPS == 1:
            total *= load_scales(scales + part_row // ROW_BLOCK, inside, SCALES, FP8_UNITS)
        if HAS_FACTORS:
            total *= tl.load(factors + part_row, mask=inside, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + part_row, mask=inside, other=0.0).to(tl.float32)
        if part:
            up = total
        else:
            result = total
    if GATED:
        result = gated(result, up, KIND, ALPHA, LIMIT)
    elif KIND == RELU2:
        result = squared_relu(result)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def takes_row(weight: QuantisedWeight) -> bool:
    """Whether ``quantised_row_triton`` takes ``weight``: its rows are whole words, and each word has one scale."""
    per_word = _WORD_BYTES * values_per_byte(weight.kind)
    has_whole_words = weight.shape[-1] % per_word == 0 and weight.codes.is_contiguous()
    return has_whole_words and (num_groups(weight) < 2 or weight.group % per_word == 0)


def quantised_row_triton(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None, activation: Activation | None = None
) -> torch.Tensor:
    """``weights.multiply_quantised`` of one row: ``x`` (1, in) -> (1, out); sums in float32, no weight rounded."""
    num_rows, size = weight.shape
    assert x.shape == (1, size) and x.stride(1) == 1 and takes_row(weight), (x.shape, weight.shape)
    is_gated = activation is not None and activation.num_parts == 2
    num_out = num_rows // 2 if is_gated else num_rows
    num_words = weight.codes.shape[1] // _WORD_BYTES
    block_words = block_of_words(num_words)
    block_out = max(_BLOCK_ELEMENTS // block_words // (2 if is_gated else 1), _MIN_BLOCK_OUT)
    codes, *others = weight_tensors(weight)
    assert codes is not None
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    quantised_row_kernel[(ceil_div(num_out, block_out),)](
        x, codes.view(torch.uint32), *others, bias, out,
        OUT=num_out, BLOCK_OUT=block_out, BLOCK_WORDS=block_words, HAS_BIAS=bias is not None,
        **weight_constants(weight), **activation_constants(activation), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def block_of_words(num_words: int) -> int:
    """Words of a row that a program takes at a time: the largest power of two that pads rows by an eighth at most."""
    block = _MAX_BLOCK_WORDS
    while block > _MIN_BLOCK_WORDS and round_up(num_words, block) * 8 > num_words * 9:
        block //= 2
    return block
