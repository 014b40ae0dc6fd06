"""Products of two 8-bit floats (W8A8) by PyTorch's scaled products, for many rows.

==================  =======================================  ====================================================
weight (e4m3)       rows of ``x``                            product
==================  =======================================  ====================================================
a scale per row     a scale per row, or one for all          ``torch._scaled_mm``, rowwise
a stack of them     a scale per row                          ``torch._scaled_grouped_mm``: GPUs of compute
                                                             capability 9.0
blocks 128 x 128    a scale per row and 128 columns          ``F.scaled_mm`` of blocks: cuBLAS on GPUs of
                                                             compute capability 9.0
==================  =======================================  ====================================================

Results are bfloat16, because the libraries' products are.  ``row_codes.multiply_rounded`` is the twin.

The first two belong to torch's private interface and the third is young, so each is compared with the twin once per
device before it is used.
"""

from functools import cache
from typing import Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.kernels.ops import op
from tp_engine.kernels.quantization.row_codes import (
    CODE_DTYPE,
    PRODUCT_DTYPE,
    CodeRule,
    RowCodes,
    Rows,
    multiply_rounded,
)
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.model_config.mlp import Activation

BLOCK = 128
_ALIGNMENT = 16  # bytes of a row, as both libraries read them
_MIN_CAPABILITY = (8, 9)
_ONLY_CAPABILITY = {"blocks": (9, 0), "stack": (9, 0)}
_ROWS_AT_ONCE, _SCALES_AT_ONCE = 4, 4  # rows and scales of 4 bytes that make up 16

Kind: TypeAlias = Literal["rows", "blocks", "stack"]


class ScaledProduct(Protocol):
    """The product of rows, as codes made by ``rule``, with a weight (out, in)."""

    rule: CodeRule

    def __call__(self, x: Rows, bias: torch.Tensor | None, activation: Activation | None = None) -> torch.Tensor:
        """``x`` (N, in) bfloat16, or its codes by ``rule`` -> (N, out) bfloat16.

        With an ``activation``, ``x`` (N, 2 * in) is gate and up, which become codes in one pass over memory.
        """


def as_codes(x: Rows, rule: CodeRule, activation: Activation | None) -> RowCodes:
    """``x`` (N, in) as codes, if it is not yet; with an ``activation``, codes of its result for ``x`` (N, 2 * in)."""
    if isinstance(x, RowCodes):
        assert activation is None, "codes are multiplied as they are"
        return x
    assert isinstance(x, torch.Tensor), "a product of codes does not normalise"
    return RowCodes(*op("quantise_rows", x.device.type)(x, rule.group, rule.scale, activation))


class RowwiseProduct:
    """A weight with a scale per row, or with none."""

    def __init__(self, weight: QuantisedWeight, input_scale: torch.Tensor | None = None) -> None:
        self.rule = CodeRule(scale=input_scale)
        self._codes, self._scales = weight.codes.view(CODE_DTYPE), row_scales(weight).unsqueeze(0)

    def __call__(self, x: Rows, bias: torch.Tensor | None, activation: Activation | None = None) -> torch.Tensor:
        rows = as_codes(x, self.rule, activation)
        return torch._scaled_mm(
            rows.codes,
            self._codes.t(),
            scale_a=rows.scales.squeeze(1).contiguous().unsqueeze(1),  # with the strides of a column
            scale_b=self._scales,
            bias=bias,
            out_dtype=PRODUCT_DTYPE,
        )


class BlockProduct:
    """A weight with a scale per block of 128 x 128."""

    rule = CodeRule(group=BLOCK)

    def __init__(self, weight: QuantisedWeight) -> None:
        scales, factors = weight.scales, weight.factors
        assert scales is not None and factors is None
        self._codes = weight.codes.view(CODE_DTYPE)
        # A row of scales, for one block of outputs, begins at a multiple of 16 bytes.
        self._scales = F.pad(scales.float(), (0, -scales.shape[1] % _SCALES_AT_ONCE)).t()

    def __call__(self, x: Rows, bias: torch.Tensor | None, activation: Activation | None = None) -> torch.Tensor:
        num_rows, padding = len(x), -len(x) % _ROWS_AT_ONCE
        rows = as_codes(x, self.rule, activation)
        codes, scales = rows.codes, rows.scales.t()
        if padding:
            codes = F.pad(codes.view(torch.uint8), (0, 0, 0, padding)).view(CODE_DTYPE)
            scales = F.pad(scales, (0, padding))
        out = F.scaled_mm(
            codes,
            self._codes.t(),
            scales.contiguous().t(),
            F.ScalingType.BlockWise1x128,
            self._scales,
            F.ScalingType.BlockWise128x128,
            output_dtype=PRODUCT_DTYPE,
        )[:num_rows]
        return out if bias is None else out + bias


class ScaledGroupedProduct:
    """A stack of weights (E, out, in), each with a scale per row or with none."""

    def __init__(self, stack: QuantisedWeight) -> None:
        self._codes, self._scales = stack.codes.view(CODE_DTYPE).transpose(1, 2), row_scales(stack)
        self._quantise = op("quantise_rows", stack.codes.device.type)

    def __call__(
        self, x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, activation: Activation | None = None
    ) -> torch.Tensor:
        """See ``GroupedProduct``; ``x`` is bfloat16, and a row that is taken several times is rounded once."""
        codes, scales = self._quantise(x, 0, None, activation)
        scales = scales.squeeze(1)
        if rows is not None:
            codes, scales = codes.view(torch.uint8)[rows].view(CODE_DTYPE), scales[rows]
        return torch._scaled_grouped_mm(
            codes, self._codes, scales.contiguous(), self._scales, offs=ends, out_dtype=x.dtype
        )


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether ``device`` is a GPU that converts and multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def row_scales(weight: QuantisedWeight) -> torch.Tensor:
    """The scale of each row, float32 (out,) or (experts, out), of a weight with at most one group of columns."""
    found = torch.ones(weight.shape[:-1], dtype=torch.float32, device=weight.codes.device)
    if weight.scales is not None:
        scales = weight.scales.float().squeeze(-1).repeat_interleave(weight.row_block, -1)
        found = scales[..., : found.shape[-1]].contiguous()
    return found if weight.factors is None else found * weight.factors


def scaled_product(weight: QuantisedWeight, input_scale: torch.Tensor | None = None) -> ScaledProduct | None:
    """The product of codes for ``weight`` on its device, or None if there is none, or if it is wrong."""
    if not has_scaled_product(weight, weight.codes.device):
        return None
    if _has_row_scales(weight):
        return RowwiseProduct(weight, input_scale)
    return BlockProduct(weight) if input_scale is None else None


def has_scaled_product(weight: QuantisedWeight, device: torch.device) -> bool:
    """Whether ``device`` has a right product of codes for such a ``weight``."""
    if not _has_aligned_codes(weight):
        return False
    if _has_row_scales(weight):
        return _is_right("rows", device)
    has_blocks = (weight.group, weight.row_block, weight.factors) == (BLOCK, BLOCK, None)
    return has_blocks and not weight.shape[-1] % BLOCK and _is_right("blocks", device)


def has_grouped_product(stack: QuantisedWeight, device: torch.device) -> bool:
    """Whether ``device`` has a right product of codes for such a ``stack`` (E, out, in)."""
    return _has_aligned_codes(stack) and _has_row_scales(stack) and _is_right("stack", device)


def _has_aligned_codes(weight: QuantisedWeight) -> bool:
    return weight.kind == "e4m3" and not any(size % _ALIGNMENT for size in weight.shape[-2:])


def _has_row_scales(weight: QuantisedWeight) -> bool:
    return weight.scales is None or weight.scales.shape[-1] == 1


@cache
def _is_right(kind: Kind, device: torch.device) -> bool:
    """Whether ``device`` has the product, and computes it as the twin does."""
    only = _ONLY_CAPABILITY.get(kind)
    if only is not None and (device.type != "cuda" or torch.cuda.get_device_capability(device) != only):
        return False
    return agrees_with_twin(kind, device)


def agrees_with_twin(kind: Kind, device: torch.device) -> bool:
    """Whether a small product on ``device`` equals the twin up to the rounding of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weight = random_codes(generator, 3 * BLOCK, 2 * BLOCK, has_blocks=kind == "blocks").map(lambda one: one.to(device))
    x = torch.randn(70, 2 * BLOCK, generator=generator, dtype=torch.float32, device="cpu").to(device, torch.bfloat16)
    expected = multiply_rounded(x, weight, None, BLOCK if kind == "blocks" else 0).float()
    try:
        if kind == "stack":
            # Three weights, of which the second has no rows, and six rows that belong to none.
            stack = weight.map(lambda one: one.reshape(3, BLOCK, *one.shape[1:]))
            rows = torch.arange(70, device=device, dtype=torch.int64).flip(0)
            found = ScaledGroupedProduct(stack)(x, rows, torch.tensor([30, 30, 64], dtype=torch.int32, device=device))[
                :64
            ]
            expected = torch.cat((expected[rows[:30], :BLOCK], expected[rows[30:64], -BLOCK:]))
        else:
            found = BlockProduct(weight)(x, None) if kind == "blocks" else RowwiseProduct(weight)(x, None)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return bool((found.float() - expected).abs().max() <= 0.02 * expected.abs().max())


def random_codes(generator: torch.Generator, out_size: int, in_size: int, *, has_blocks: bool) -> QuantisedWeight:
    """A weight of random e4m3 codes with scales of different sizes, on the CPU."""
    codes = (
        torch.randn(out_size, in_size, generator=generator, dtype=torch.float32, device="cpu")
        .to(CODE_DTYPE)
        .view(torch.uint8)
    )
    if not has_blocks:
        factors = torch.rand(out_size, generator=generator, dtype=torch.float32, device="cpu") + 0.5
        return QuantisedWeight(kind="e4m3", codes=codes, factors=factors)
    scales = (
        torch.rand(-(-out_size // BLOCK), -(-in_size // BLOCK), generator=generator, dtype=torch.float32, device="cpu")
        + 0.5
    )
    return QuantisedWeight(kind="e4m3", codes=codes, scales=scales, group=BLOCK, row_block=BLOCK)
