"""PyTorch's products of 8-bit floats on a GPU, against the twin."""

from __future__ import annotations

import pytest
import torch

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import op
from tp_engine.kernels.quantization.row_codes import multiply_rounded
from tp_engine.kernels.quantization.scaled_products import (
    BlockProduct,
    RowwiseProduct,
    ScaledGroupedProduct,
    has_grouped_product,
    random_codes,
    scaled_product,
)
from tp_engine.model_config.mlp import SILU

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(CAPABILITY < (8, 9), reason="needs a GPU with 8-bit floats")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 65, 130, 1000])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_scaled_product(has_blocks: bool, num_rows: int, has_bias: bool) -> None:
    """Oracle: the twin, rounded alike but for the order of sums; 4.5 blocks of outputs."""
    weight = random_codes(torch.Generator().manual_seed(3), 576, 1024, has_blocks=has_blocks).map(torch.Tensor.cuda)
    product = scaled_product(weight)
    if has_blocks and CAPABILITY != (9, 0):
        assert product is None
        return
    assert isinstance(product, BlockProduct if has_blocks else RowwiseProduct), "the library's product is missing"
    x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
    bias = torch.randn(576, device="cuda").bfloat16() if has_bias else None
    found, twin = product(x, bias).float(), multiply_rounded(x, weight, bias, 128 if has_blocks else 0).float()
    assert (found - twin).abs().max() <= 0.01 * twin.abs().max()


def test_one_scale_for_all_rows() -> None:
    """Oracle: the twin."""
    weight = random_codes(torch.Generator().manual_seed(3), 64, 256, has_blocks=False).map(torch.Tensor.cuda)
    scale = torch.tensor(0.01, device="cuda")
    product = scaled_product(weight, scale)
    assert product is not None
    x = torch.randn(100, 256, device="cuda").bfloat16()
    found, twin = product(x, None).float(), multiply_rounded(x, weight, None, scale=scale).float()
    assert (found - twin).abs().max() <= 0.01 * twin.abs().max()


@pytest.mark.parametrize("num_rows", [4, 70, 3000])
def test_grouped_product(num_rows: int) -> None:
    """Oracle: the twin of each weight; the second has no rows, and the last eighth of the rows belongs to none."""
    generator = torch.Generator().manual_seed(3)
    stack = random_codes(generator, 3 * 192, 512, has_blocks=False).map(
        lambda one: one.cuda().reshape(3, 192, *one.shape[1:])
    )
    assert has_grouped_product(stack, stack.codes.device) == (CAPABILITY == (9, 0)), "the library's product is missing"
    if CAPABILITY != (9, 0):
        return
    product = ScaledGroupedProduct(stack)
    x, rows = torch.randn(50, 512, device="cuda").bfloat16(), torch.randint(50, (num_rows,), device="cuda")
    ends = [num_rows // 4, num_rows // 4, num_rows * 7 // 8]
    found = product(x, rows, torch.tensor(ends, dtype=torch.int32, device="cuda")).float()
    for expert, own in ((0, slice(0, ends[0])), (2, slice(ends[1], ends[2]))):
        twin = multiply_rounded(x[rows[own]], stack.expert(expert), None).float()
        assert (found[own] - twin).abs().max() <= 0.01 * twin.abs().max()


@pytest.mark.parametrize("num_rows", [65, 1000])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_product_of_gate_and_up(has_blocks: bool, num_rows: int) -> None:
    """Oracle: the same product of the activation's stored result, bit by bit."""
    weight = random_codes(torch.Generator().manual_seed(3), 512, 1280, has_blocks=has_blocks).map(torch.Tensor.cuda)
    product = scaled_product(weight)
    if product is None:
        pytest.skip("this GPU has no such product")
    both = torch.randn(num_rows, 2560, device="cuda").bfloat16()
    expected = product(op("gate", "cuda")(both, SILU), None)
    assert torch.equal(product(both, None, SILU), expected)


@pytest.mark.parametrize("num_rows", [65, 1000])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_product_of_a_norm_s_codes(has_blocks: bool, num_rows: int) -> None:
    """Oracle: the same product of the stored norm, bit by bit; the sum with the residual too."""
    weight = random_codes(torch.Generator().manual_seed(3), 512, 1280, has_blocks=has_blocks).map(torch.Tensor.cuda)
    product = scaled_product(weight)
    if product is None:
        pytest.skip("this GPU has no such product")
    x, residual = (torch.randn(num_rows, 1280, device="cuda").bfloat16() for _ in range(2))
    rule = NormRule(torch.randn(1280, device="cuda").bfloat16(), 1e-6)
    rest = residual.clone()
    expected = product(op("add_norm", "cuda")(x, rest, rule), None)
    assert torch.equal(product(op("norm_codes", "cuda")(x, residual, rule, product.rule), None), expected)
    assert torch.equal(residual, rest)
