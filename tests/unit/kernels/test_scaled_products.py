"""Products of 8-bit floats: rows as codes, PyTorch's scaled products, and what they are compared with."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.unit.kernels.kernel_cases_quantised import make_weight
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.experts.grouped import GroupedExperts, why_no_grouped
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.quantization import scaled_products
from tp_engine.kernels.quantization.row_codes import CODE_DTYPE, multiply_rounded, quantise_rows, rounded_rows
from tp_engine.kernels.quantization.scaled_products import (
    RowwiseProduct,
    ScaledGroupedProduct,
    agrees_with_twin,
    has_grouped_product,
    random_codes,
    row_scales,
    scaled_product,
)
from tp_engine.kernels.quantization.weights import QuantisedWeight, dequantise
from tp_engine.model_config.mlp import SILU

CPU = torch.device("cpu")


@pytest.mark.parametrize("group", [0, 16])
def test_rows_as_codes(group: int) -> None:
    """Oracle: each value is within half a step of e4m3, 1/16 of itself or 2^-10 of the scale; zeros, NaN and one value
    alone."""
    x = torch.randn(6, 40) * torch.tensor([1e-3, 1.0, 1e4, 1.0, 1.0, 1.0]).unsqueeze(1)
    x[3], x[4, 7], x[5, 1:] = 0, torch.nan, 0
    codes, scales = quantise_rows(x, group)
    assert codes.dtype == CODE_DTYPE and codes.shape == x.shape and scales.shape == (6, 3 if group else 1)
    found = rounded_rows(x, group)
    width = group or 40
    allowed = torch.maximum(x.abs() / 16, scales.repeat_interleave(width, 1)[:, :40] * 2**-10)
    rows = [0, 1, 2, 3, 5]
    assert (found - x).abs()[rows].le(allowed[rows] * 1.001).all()
    torch.testing.assert_close(found[5, :1], x[5, :1], rtol=2**-23, atol=0)  # x / 448 * 448: both steps may round
    assert not found[3].any()
    broken = found[4].isnan()
    assert broken[:width].all() and not broken[width:].any()


def test_one_scale_for_all_rows() -> None:
    """Oracle: by hand: 448 steps are the most."""
    x = torch.tensor([[1.0, -3.0], [1000.0, 0.5]])
    codes, scales = quantise_rows(x, scale=torch.tensor(2.0))
    assert scales.tolist() == [[2.0], [2.0]] and codes.float().tolist() == [[0.5, -1.5], [448.0, 0.25]]


@pytest.mark.parametrize("has_input_scale", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rowwise_product(has_bias: bool, has_input_scale: bool) -> None:
    """Oracle: the twin, rounded alike but for the order of sums; and the values of the weight within e4m3's steps."""
    weight = random_codes(torch.Generator().manual_seed(3), 48, 160, has_blocks=False)
    scale = torch.tensor(0.01) if has_input_scale else None
    x, bias = torch.randn(9, 160).bfloat16(), torch.randn(48).bfloat16() if has_bias else None
    product = scaled_product(weight, scale)
    assert isinstance(product, RowwiseProduct)
    found, twin = product(x, bias).float(), multiply_rounded(x, weight, bias, scale=scale).float()
    torch.testing.assert_close(found, twin, rtol=2**-7, atol=2e-2)
    exact = F.linear(x.float(), dequantise(weight), None if bias is None else bias.float())
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()


def test_which_weights_have_a_product() -> None:
    """Oracle: the table: 8-bit floats only, rows of 16 bytes; blocks need a GPU."""
    assert scaled_product(make_weight("int8", (32, 64), factors=True)) is None
    assert scaled_product(make_weight("e4m3", (33, 64), factors=True)) is None
    assert scaled_product(make_weight("e4m3", (32, 72), factors=True)) is None
    assert scaled_product(make_weight("e4m3", (32, 64))) is not None
    assert scaled_product(make_weight("e4m3", (256, 256), group=128, row_block=128)) is None


def test_a_wrong_product_is_not_used() -> None:
    """Oracle: None if the library's product is wrong or refuses."""
    weight = make_weight("e4m3", (32, 64))
    for broken in (lambda *args, **kwargs: torch.zeros(70, 384), RuntimeError):
        scaled_products._is_right.cache_clear()
        with patch.object(torch, "_scaled_mm", side_effect=broken):
            assert scaled_product(weight) is None
    scaled_products._is_right.cache_clear()


def test_scales_of_rows() -> None:
    """Oracle: scales of blocks of rows, times factors, by hand; the last block is cut."""
    weight = make_weight("e4m3", (5, 16), group=16, row_block=2, factors=True)
    assert weight.scales is not None and weight.factors is not None
    expected = weight.scales[[0, 0, 1, 1, 2], 0] * weight.factors
    assert torch.equal(row_scales(weight), expected)


def test_block_product_is_called_as_cublas_wants_it() -> None:
    """Oracle: what PyTorch's own tests pass: scales outermost, four at a time, rows in fours; the twin's values."""
    weight = random_codes(torch.Generator().manual_seed(3), 3 * 128, 2 * 128, has_blocks=True)
    x, bias = torch.randn(6, 256).bfloat16(), torch.randn(384).bfloat16()

    def product(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, _: object, scale_b: torch.Tensor, *rest: object,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        assert a.shape == (8, 256) and b.shape == (256, 384) and a.is_contiguous() and b.t().is_contiguous()
        assert scale_a.shape == (8, 2) and scale_a.stride() == (1, 8)
        assert scale_b.shape == (4, 3) and scale_b.stride() == (1, 4)
        wide = a.float() * scale_a.repeat_interleave(128, 1)
        weights = b.float() * scale_b[:2].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (wide @ weights).to(output_dtype)

    with patch.object(F, "scaled_mm", product):
        found = scaled_products.BlockProduct(weight)(x, bias)
    expected = multiply_rounded(x, weight, bias, 128)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2e-1)


def random_stack(num_experts: int, out_size: int, in_size: int, seed: int = 3) -> QuantisedWeight:
    """Random e4m3 codes, with a scale per row."""
    generator = torch.Generator().manual_seed(seed)
    both = random_codes(generator, num_experts * out_size, in_size, has_blocks=False)
    return both.map(lambda one: one.reshape(num_experts, out_size, *one.shape[1:]))


def grouped_on_cpu(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *,
    offs: torch.Tensor, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """``torch._scaled_grouped_mm`` rowwise, whose checks PyTorch makes of tensors without memory."""
    meta = [one.to("meta") for one in (a, b, scale_a, scale_b)]
    library = torch.ops.aten._scaled_grouped_mm.default(*meta, offs=offs.to("meta"), out_dtype=out_dtype)
    out, start = torch.full(library.shape, torch.nan), 0
    for expert, end in enumerate(offs.tolist()):
        own = slice(start, end)
        out[own] = (a[own].float() @ b[expert].float()) * scale_a[own, None] * scale_b[expert]
        start = end
    return out.to(out_dtype)


def test_stack_is_compared_with_the_twin() -> None:
    """Oracle: right with the library's arithmetic, wrong if two experts are exchanged; there is none on a CPU."""
    stack, cpu = random_stack(2, 32, 64), CPU
    assert not agrees_with_twin("stack", cpu) and not has_grouped_product(stack, cpu)
    with patch.object(torch, "_scaled_grouped_mm", grouped_on_cpu):
        assert agrees_with_twin("stack", cpu)
    with patch.object(
        torch, "_scaled_grouped_mm", lambda a, b, *rest, **more: grouped_on_cpu(a, b.flip(0), *rest, **more)
    ):
        assert not agrees_with_twin("stack", cpu)


def test_which_stacks_have_a_product() -> None:
    """Oracle: as for one weight: 8-bit floats, rows of 16 bytes, a scale per row; experts without biases."""
    with patch.object(scaled_products, "_is_right", return_value=True):
        whole = make_weight("e4m3", (2, 32, 64), group=64, row_block=32)
        assert has_grouped_product(whole, CPU)
        assert not has_grouped_product(make_weight("e4m3", (2, 32, 64), group=16, row_block=16), CPU)
        assert not has_grouped_product(make_weight("e4m3", (2, 24, 64), factors=True), CPU)
        assert not has_grouped_product(make_weight("int8", (2, 32, 64), factors=True), CPU)
        for bias, quantises, is_there in ((False, True, True), (False, False, False), (True, True, False)):
            weights = ExpertWeights(
                gate_up=random_stack(2, 64, 32), down=random_stack(2, 32, 32), first=0, activation=SILU,
                gate_up_bias=torch.zeros(2, 64) if bias else None, down_bias=None,
            )  # fmt: skip
            assert (why_no_grouped(weights, CPU, rounds_rows=quantises) is None) == is_there
    scales = row_scales(whole)
    assert scales.shape == (2, 32) and torch.equal(scales[1], row_scales(whole.expert(1)))


@pytest.mark.parametrize("first", [0, 2])
def test_grouped_experts(first: int) -> None:
    """Oracle: each pair by the twin of products of codes; some experts are on another rank, and one has no pair."""
    gate_up, down = random_stack(3, 64, 48, 1), random_stack(3, 48, 32, 2)
    product = GroupedExperts(ScaledGroupedProduct(gate_up), ScaledGroupedProduct(down), SILU, first)
    x, ids = torch.randn(10, 48).bfloat16() / 8, torch.tensor([[0, 1], [4, 2], [2, 0], [5, 4], [1, 2]] * 2).int()
    with patch.object(torch, "_scaled_grouped_mm", grouped_on_cpu):
        found = product(x, ids, 3)
    for pair, expert in enumerate((ids.flatten() - first).tolist()):
        if not 0 <= expert < 3:
            continue
        inner = gate(multiply_rounded(x[pair // 2, None], gate_up.expert(expert), None), SILU)
        expected = multiply_rounded(inner, down.expert(expert), None)[0].float()
        torch.testing.assert_close(found[pair].float(), expected, rtol=2**-4, atol=0.02 * expected.abs().max().item())
