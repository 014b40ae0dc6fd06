"""Products with quantised weights in C against float64, and the bits of a row; skipped where C cannot be built."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from operator import itemgetter
from typing import Any, get_args

import pytest
import torch

from tests.unit.kernels.kernel_cases_experts import CLAMPED, RELU2, make_ids
from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, random
from tests.unit.kernels.kernel_cases_quantised import BFLOAT16, E4M3, E8M0, FLOAT16, FLOAT32, UINT8, make_weight
from tests.unit.kernels.test_experts import assert_rows_are_their_own
from tp_engine.cpu.experts import NativeExperts
from tp_engine.cpu.library import native_library
from tp_engine.cpu.quantised import QuantisedPanels
from tp_engine.distributed.collectives import SingleRank
from tp_engine.kernels.experts.experts import ExpertWeights, mix_experts
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.ops import implementation
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, dequantise, values_per_byte
from tp_engine.model_config.mlp import SILU, Activation
from tp_engine.worker.graphs.tape_recorder import TapeRecorder

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
KINDS: tuple[Codes, ...] = get_args(Codes)
SCALES = [None, FLOAT32, BFLOAT16, FLOAT16, E4M3, E8M0, UINT8]
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 65, 100]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    library = native_library()
    if library is None:
        pytest.skip("the native kernels cannot be built here")
    return library


def operands(size: tuple[int, int], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x, whose rows are strided and begin at any offset, and a bias."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, size[1] + 3, generator=generator).to(dtype)[:, 1 : size[1] + 1]
    return x, torch.randn(size[0], generator=generator).to(dtype)


def check(library: ctypes.CDLL, weight: QuantisedWeight, dtype: torch.dtype, rows: list[int]) -> None:
    """Against float64: an error of float32 sums, and one rounding to ``dtype``."""
    panels, exact_weight = QuantisedPanels(library, weight, dtype), dequantise(weight).double()
    out_size, in_size = weight.shape
    for count in rows:
        x, bias = operands((out_size, in_size), count, dtype)
        exact, found = x.double() @ exact_weight.T + bias.double(), panels(x, bias)
        size = (x.double().abs() @ exact_weight.abs().T + bias.double().abs()) * 2.0**-20
        allowed = size + exact.abs() * (torch.finfo(dtype).eps * 0.51)
        assert found.dtype == dtype and found.shape == exact.shape
        assert ((found.double() - exact).abs() <= allowed).all(), (count, (found.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products(library: ctypes.CDLL, kind: Codes, scales: torch.dtype | None, dtype: torch.dtype) -> None:
    """Oracle: float64; each kind and type of scales with each type of x, with zeros where they may be, and factors."""
    zeros = kind in ("int4", "int8") and scales is not None
    for has_zeros in {False, zeros}:
        options: dict[str, Any] = {"group": 32, "scales": scales} if scales else {}
        weight = make_weight(kind, (70, 200), zeros=has_zeros, factors=has_zeros or scales is UINT8, **options)
        check(library, weight, dtype, [1, 4, 20])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_without_its_lowest_value(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Oracle: float64, and the codes' values bit by bit; C may then decode by sign and size."""
    weight = make_weight("int8", (70, 200), group=32, scales=BFLOAT16, zeros=True)
    check(library, replace(weight, codes=weight.codes.masked_fill(weight.codes == 128, 129)), dtype, ROWS)
    weight = QuantisedWeight(
        kind="int8", codes=torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 4)[torch.arange(256) != 128]
    )
    panels = QuantisedPanels(library, weight, dtype)
    for rows in (1, 9):
        x = torch.eye(4, dtype=dtype)[:1].repeat(rows, 1)
        assert torch.equal(panels(x, None), dequantise(weight)[:, 0].to(dtype).expand(rows, -1))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows(library: ctypes.CDLL, kind: Codes, rows: int) -> None:
    """Oracle: float64; numbers of rows on both sides of each tile's limit."""
    for dtype in DTYPES:
        check(library, make_weight(kind, (133, 1200), group=64, zeros=kind == "int4"), dtype, [rows])


@pytest.mark.parametrize("group", [1, 8, 16, 32, 48, 64, 100, 128, 520, 600, 1100])
@pytest.mark.parametrize("kind", KINDS)
def test_groups(library: ctypes.CDLL, kind: Codes, group: int) -> None:
    """Oracle: float64; groups that end within a word, are long, or do not divide the row; one group with and without
    factors."""
    for in_size in (group, 1100, 94):
        in_size += in_size % 2 if values_per_byte(kind) == 2 else 0
        zeros = kind in ("int4", "int8")
        for dtype in (BFLOAT16, FLOAT32):
            weight = make_weight(kind, (37, in_size), group=group, scales=BFLOAT16, zeros=zeros, factors=group % 3 == 0)
            check(library, weight, dtype, [1, 9])


@pytest.mark.parametrize("size", [(1, 2), (3, 6), (16, 32), (64, 66), (129, 40)])
@pytest.mark.parametrize("kind", KINDS)
def test_small_sizes(library: ctypes.CDLL, kind: Codes, size: tuple[int, int]) -> None:
    """Oracle: float64."""
    for dtype in DTYPES:
        check(library, make_weight(kind, size, group=32, scales=FLOAT16), dtype, [1, 7])
    if values_per_byte(kind) == 1:
        check(library, make_weight(kind, (size[0], size[1] + 1), group=32), BFLOAT16, [1, 7])


@pytest.mark.parametrize("row_block", [3, 4, 16, 32, 100, 128])
@pytest.mark.parametrize("scales", [FLOAT32, BFLOAT16, E8M0], ids=str)
def test_blocks(library: ctypes.CDLL, row_block: int, scales: torch.dtype) -> None:
    """Oracle: float64; blocks that end within a vector of outputs, with and without gate and up."""
    weight = make_weight("e4m3", (288, 300), group=128, scales=scales, row_block=row_block)
    for dtype in DTYPES:
        check(library, weight, dtype, [1, 9])
        for size in (288, 278):
            part = replace(weight, codes=weight.codes[:size])
            x, bias = operands((size, 300), 5, dtype)
            product = QuantisedPanels(library, part, dtype)(x, bias)
            found = QuantisedPanels(library, part, dtype, SILU)(x, bias)
            torch.testing.assert_close(found, gate(product, SILU))
            assert torch.equal(QuantisedPanels(library, part, dtype, SILU).before_activation(x, bias), product)


@pytest.mark.parametrize("scales", SCALES[1:], ids=str)
def test_every_scale(library: ctypes.CDLL, scales: torch.dtype) -> None:
    """Oracle: the scales themselves, bit by bit: products of 1 with codes of 1, all 256 patterns of 8 bits, some of
    16 and 32."""
    size = torch.zeros((), dtype=scales).element_size()
    patterns = torch.arange(256, dtype=torch.uint8) if size == 1 else torch.randint(256, (256 * size,)).to(torch.uint8)
    values = patterns.view(scales).view(-1, 1)
    values = values[values.float().isfinite().flatten()]
    weight = QuantisedWeight(
        kind="int8",
        codes=torch.tensor([1, 0, 0, 0], dtype=torch.uint8).repeat(len(values), 2),
        scales=values.expand(-1, 2).contiguous(),
        group=4,
    )
    found = QuantisedPanels(library, weight, FLOAT32)(torch.eye(8)[:1], None)
    assert torch.equal(found[0], values.float().flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code(library: ctypes.CDLL, kind: Codes, dtype: torch.dtype) -> None:
    """Oracle: the codes' values, bit by bit, by products with unit vectors in small and large batches."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    if kind == "e4m3":
        codes = codes.masked_fill((codes & 127) == 127, 0)
    weight = QuantisedWeight(kind=kind, codes=codes)
    columns = weight.shape[1]
    panels, expected = QuantisedPanels(library, weight, dtype), dequantise(weight).T.to(dtype)
    assert torch.equal(panels(torch.eye(columns, dtype=dtype), None), expected)
    for column in range(columns):
        assert torch.equal(panels(torch.eye(columns, dtype=dtype)[column, None], None)[0], expected[column])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [SILU, RELU2])
def test_a_rows_result_is_its_own(
    library: ctypes.CDLL, activation: Activation, kind: Codes, dtype: torch.dtype
) -> None:
    """Oracle: the same rows in other batches and with other numbers of threads, bit by bit, with and without an
    activation, and before it; and the activation of the product, bit by bit."""
    weight = make_weight(kind, (260, 1500), group=48, zeros=kind == "int4", factors=True)
    x, bias = operands((260, 1500), 130, dtype)
    threads = torch.get_num_threads()
    product, gated = QuantisedPanels(library, weight, dtype), QuantisedPanels(library, weight, dtype, activation)
    whole, whole_gated = product(x, bias), gated(x, bias)
    assert torch.equal(whole_gated, implementation("gate", "native")(whole, activation))
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for rows in (*ROWS, 130):
                own = slice(130 - rows, 130)
                assert torch.equal(product(x[own], bias), whole[own])
                assert torch.equal(gated(x[own], bias), whole_gated[own])
                assert torch.equal(gated.before_activation(x[own], bias), whole[own])
    finally:
        torch.set_num_threads(threads)


def test_a_product_of_no_rows_is_empty(library: ctypes.CDLL) -> None:
    """Oracle: an empty result."""
    panels = QuantisedPanels(library, make_weight("int4", (40, 64), group=32), BFLOAT16)
    assert panels(torch.empty(0, 64, dtype=BFLOAT16), None).shape == (0, 40)


def test_memory_is_that_of_the_checkpoint(library: ctypes.CDLL) -> None:
    """Oracle: at most 3 % more than the weight's own tensors."""
    for weight in (
        make_weight("int4", (512, 1024), group=128, scales=BFLOAT16, zeros=True),
        make_weight("e2m1", (512, 1024), group=16, scales=E4M3, factors=True),
        make_weight("e2m1", (512, 1024), group=32, scales=E8M0),
        make_weight("e4m3", (512, 1024), group=128, scales=FLOAT32, row_block=128),
        make_weight("int8", (512, 1024), group=1024, scales=BFLOAT16),
    ):
        assert QuantisedPanels(library, weight, BFLOAT16).num_bytes <= 1.03 * weight.num_bytes


def make_experts(
    kind: Codes, inner: int, dtype: torch.dtype, activation: Activation = CLAMPED, **options: Any
) -> ExpertWeights[QuantisedWeight]:
    """Six experts of 72 columns; ``options`` of ``make_weight``, and a bias for each product."""
    rows = activation.num_parts * inner
    return ExpertWeights(
        gate_up=make_weight(kind, (6, rows, 72), **options),
        down=make_weight(kind, (6, 72, inner), **options),
        gate_up_bias=random((6, rows), dtype, "cpu", 3),
        down_bias=random((6, 72), dtype, "cpu", 4),
        first=0,
        activation=activation,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "spread"), [(1, "spread"), (7, "even"), (130, "one"), (300, "spread")])
def test_experts(library: ctypes.CDLL, num_tokens: int, spread: str, kind: Codes, dtype: torch.dtype) -> None:
    """Oracle: the dense twin in float64; one expert with all tokens, experts without tokens, groups within words."""
    zeros, activation = kind == "int4", RELU2 if num_tokens in (7, 300) else CLAMPED
    options = {"group": 16 if num_tokens > 7 else 12, "zeros": zeros, "factors": not zeros}
    weights = make_experts(kind, 40, dtype, activation, **options)
    assert weights.gate_up_bias is not None and weights.down_bias is not None
    x, ids = random((num_tokens, 72), dtype, "cpu"), make_ids(spread, num_tokens, 3, 6, "cpu")
    shares = random((num_tokens, 3), FLOAT32, "cpu", 5).sigmoid()
    wide = ExpertWeights(
        gate_up=dequantise(weights.gate_up).double(),
        down=dequantise(weights.down).double(),
        gate_up_bias=weights.gate_up_bias.double(),
        down_bias=weights.down_bias.double(),
        first=0,
        activation=weights.activation,
    )
    exact = mix_experts(x.double(), ids, shares, wide)
    found = NativeExperts(library, weights, 3, dtype)(x, ids, shares)
    twin = mix_experts(x, ids, shares, weights)
    assert_close_enough(found, twin, exact, granted=exact.abs().max().item() * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_rows_and_ranks(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Oracle: a row alone and with one thread, bit by bit; the sum over two ranks with half of the experts each."""
    weights = make_experts("e2m1", 40, dtype, group=32, scales=E8M0)
    product, x = NativeExperts(library, weights, 2, dtype), random((90, 72), dtype, "cpu")
    ids, shares = make_ids("spread", 90, 2, 6, "cpu"), random((90, 2), FLOAT32, "cpu", 5)
    assert_rows_are_their_own(product, x, ids, shares)
    whole = product(x, ids, shares)
    assert weights.gate_up_bias is not None and weights.down_bias is not None
    total = torch.zeros(90, 72)
    for first in (0, 3):
        own = slice(first, first + 3)
        part = replace(
            weights,
            gate_up=weights.gate_up.map(itemgetter(own)),
            down=weights.down.map(itemgetter(own)),
            gate_up_bias=weights.gate_up_bias[own],
            down_bias=weights.down_bias[own],
            first=first,
        )
        total += NativeExperts(library, part, 2, dtype)(x, ids, shares).float()
    unit = torch.finfo(dtype).eps * 4 * whole.abs().max().item()
    torch.testing.assert_close(total, whole.float(), rtol=0, atol=unit)
    assert product(x[:0], ids[:0], shares[:0]).shape == (0, 72)


def test_tapes(library: ctypes.CDLL) -> None:
    """Oracle: the same calls without a tape, bit by bit, with another x each time."""
    panels = QuantisedPanels(library, make_weight("int4", (144, 72), group=8, zeros=True), BFLOAT16, SILU)
    experts = NativeExperts(library, make_experts("int8", 40, BFLOAT16, group=20), 2, BFLOAT16)
    x, ids, shares = random((5, 72), BFLOAT16, "cpu"), make_ids("spread", 5, 2, 6, "cpu"), torch.rand(5, 2)

    def step() -> torch.Tensor:
        return experts(panels(x, None), ids, shares)

    recorded = TapeRecorder(library, SingleRank()).record(step)
    with torch.inference_mode():
        for run in range(4):
            x.copy_(random((5, 72), BFLOAT16, "cpu", run))
            assert torch.equal(recorded.run(), step())
    assert recorded.is_settled
