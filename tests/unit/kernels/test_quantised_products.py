"""How products with quantised weights are chosen."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.kernel_cases_layer_ops import random
from tests.unit.kernels.kernel_harness import needs_triton
from tp_engine.cpu.library import native_library
from tp_engine.kernels import layer_ops
from tp_engine.kernels.candidates import MANY, Choice, Choices, key_of
from tp_engine.kernels.experts.experts import ExpertWeights, mix_experts
from tp_engine.kernels.quantization.linear_candidates import NAME, shape_of
from tp_engine.kernels.quantization.row_codes import RowCodes, quantise_rows
from tp_engine.kernels.quantization.scaled_products import BlockProduct, RowwiseProduct, random_codes
from tp_engine.kernels.quantization.weights import QuantisedWeight, multiply_quantised
from tp_engine.layers.quantization import dense, quantised_products
from tp_engine.layers.quantization.dense import choose_experts
from tp_engine.layers.quantization.quantised_products import (
    TritonQuantised,
    choose_quantised_product,
    gated_pair,
    wanted_codes,
)
from tp_engine.model_config.mlp import SILU, ExpertsSpec, RoutingRule


def random_weight(*shape: int) -> QuantisedWeight:
    """Codes of 8 bits, one scale for 16 columns."""
    generator = torch.Generator().manual_seed(len(shape))
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(*shape[:-1], -(-shape[-1] // 16), generator=generator) * 0.002
    return QuantisedWeight(kind="int8", codes=codes, scales=scales, group=16)


@pytest.fixture(params=[False, True], ids=["no_library", "library"])
def has_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the compiled kernels, where they can be built, and without."""
    if not request.param:
        for module in (dense, quantised_products):
            monkeypatch.setattr(module, "native_library", lambda: None)
    return request.param and native_library() is not None


def test_products_on_a_cpu(has_library: bool) -> None:
    """Oracle: the twins; weights with and without activation; steps can be recorded where there is C."""
    x, weight = random((5, 40), torch.float32, "cpu"), random_weight(12, 40)
    for activation in (None, SILU):
        for quantises in (False, True):
            product = choose_quantised_product(
                weight, dtype=x.dtype, activation=activation, quantises_activations=quantises
            )
            expected = multiply_quantised(x, weight, None, activation)
            torch.testing.assert_close(product(x, None), expected, rtol=1e-5, atol=1e-5)
            assert product.is_recordable is has_library


def test_experts_on_a_cpu(has_library: bool) -> None:
    """Oracle: the twin; steps can be recorded where there is C."""
    weights = ExpertWeights(
        gate_up=random_weight(4, 16, 40), down=random_weight(4, 40, 8),
        gate_up_bias=None, down_bias=None, first=0, activation=SILU,
    )  # fmt: skip
    x, shares = (random((5, size), torch.float32, "cpu") for size in (40, 2))
    ids = torch.tensor([[0, 2]] * 5, dtype=torch.int32)
    spec = ExpertsSpec(num_experts=4, inner_size=8, rule=RoutingRule(top_k=2))
    product = choose_experts(weights, spec, x.dtype)
    expected = mix_experts(x, ids, shares, weights)
    torch.testing.assert_close(product(x, ids, shares), expected, rtol=1e-5, atol=1e-5)
    assert product.is_recordable is has_library


@needs_triton
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_pair(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the two products one after the other, bit by bit; there is none without a product of codes."""
    monkeypatch.setattr(quantised_products, "op", lambda name, device_type: getattr(layer_ops, name))
    generator = torch.Generator().manual_seed(1)
    weights = [random_codes(generator, *shape, has_blocks=False) for shape in ((96, 32), (32, 48))]
    gate_up = TritonQuantised(weights[0], SILU, RowwiseProduct(weights[0]))
    down = TritonQuantised(weights[1], None, RowwiseProduct(weights[1]))
    pair = gated_pair(gate_up, down)
    assert pair is not None and gated_pair(gate_up, TritonQuantised(weights[1], None)) is None
    x = random((pair.more_than + 1, 32), torch.bfloat16, "cpu") / 8
    biases = [random((size,), torch.bfloat16, "cpu") if has_bias else None for size in (96, 32)]
    expected = pair(x, *biases)
    assert torch.equal(expected, down(gate_up(x, biases[0]), biases[1]))
    assert torch.equal(pair(RowCodes(*quantise_rows(x)), *biases), expected)


@needs_triton
def test_a_device_chooses_where_codes_begin() -> None:
    """Oracle: the last line of the choice: more rows than those before it become codes, in norms as well; a pair of
    products takes them where both do.  Rows that must not be rounded have no such choice."""
    blocks = random_codes(torch.Generator().manual_seed(1), 128, 256, has_blocks=True)
    found = {}
    for least, activation in ((16, SILU), (32, None)):
        shape = shape_of(blocks, torch.bfloat16, activation, rounds_rows=True)
        tiles = "tiles-16x32x64-w4-s4" if least == 16 else "tiles-32x32x64-w4-s4"
        choice: Choice = ((least, tiles), (MANY, "codes-64x128x128-w8-s4"))
        choices = Choices({key_of(NAME, shape): choice})
        found[least] = TritonQuantised(blocks, activation, rounds_rows=True, choices=choices)
        assert TritonQuantised(blocks, activation, choices=choices).scaled is None
    assert [one.few_rows for one in found.values()] == [16, 32] and found[16].made_by.startswith(
        "Triton, above 16 rows"
    )
    wanted, pair = wanted_codes([*found.values()]), gated_pair(found[16], found[32])
    assert wanted is not None and (wanted.rule.group, wanted.more_than) == (128, 32)
    assert pair is not None and pair.more_than == 32


@needs_triton
def test_wanted_codes() -> None:
    """Oracle: the rule: all readers multiply codes, and round alike: one input scale is not another."""
    generator = torch.Generator().manual_seed(1)
    rows, blocks = (random_codes(generator, 128, 128, has_blocks=has_blocks) for has_blocks in (False, True))
    scale = torch.tensor(0.1)

    def product(scaled: RowwiseProduct | BlockProduct | None) -> TritonQuantised:
        return TritonQuantised(rows, None, scaled)

    plain, other = product(RowwiseProduct(rows)), product(RowwiseProduct(rows))
    of_blocks, fixed, weight_only = product(BlockProduct(blocks)), product(RowwiseProduct(rows, scale)), product(None)
    for products, group, own in (([plain, other], 0, None), ([of_blocks], 128, None), ([fixed, fixed], 0, scale)):
        wanted = wanted_codes(products)
        assert wanted is not None and (wanted.rule.group, wanted.rule.scale) == (group, own)
        assert wanted.more_than == products[0].few_rows
    also_fixed = product(RowwiseProduct(rows, scale.clone()))
    for products in ([], [weight_only], [plain, weight_only], [plain, of_blocks], [plain, fixed], [fixed, also_fixed]):
        assert wanted_codes(products) is None


@needs_triton
@pytest.mark.parametrize("has_input_scale", [False, True])
def test_codes_instead_of_rows(has_input_scale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the product of the rows, bit by bit; scales may lie in memory as either kernel writes them."""
    monkeypatch.setattr(quantised_products, "op", lambda name, device_type: getattr(layer_ops, name))
    weight = random_codes(torch.Generator().manual_seed(1), 96, 32, has_blocks=False)
    scale = torch.tensor(0.01) if has_input_scale else None
    x, bias = random((70, 32), torch.bfloat16, "cpu"), random((96,), torch.bfloat16, "cpu")
    codes, scales = quantise_rows(x, scale=scale)
    for activation in (None, SILU):
        product = TritonQuantised(weight, activation, RowwiseProduct(weight, scale))
        for own in (scales, scales.clone(), scales.t().contiguous().t()):
            assert torch.equal(product(RowCodes(codes, own), bias), product(x, bias))
