"""The ways to compute ``x @ weight.T + bias``, and the choice among them, against float64 and ``F.linear``."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from tp_engine.cpu.library import native_library
from tp_engine.cpu.linear import PackedWeight
from tp_engine.distributed.collectives import SingleRank
from tp_engine.kernels.layer_ops import embed, gate
from tp_engine.kernels.ops import implementation
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.quantization import choose_formats, dense
from tp_engine.layers.quantization.dense import PackedLinear, PlainLinear, ThenGate, choose_product
from tp_engine.model_config.mlp import SILU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 6), (37, 83), (37, 84), (16, 32), (33, 31), (70, 1100), (70, 2500)]  # (out, in)
PANEL_SIZES = [(dtype, size) for dtype in DTYPES for size in SIZES if dtype is torch.float32 or size[1] % 2 == 0]
ERROR_UNITS = 4
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 65]


@pytest.fixture
def library() -> ctypes.CDLL:
    library = native_library()
    if library is None:
        pytest.skip("the native kernels cannot be built here")
    return library


@pytest.fixture(params=[False, True], ids=["no_library", "library"])
def any_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels, where they can be built, and without."""
    if not request.param:
        monkeypatch.setattr(dense, "native_library", lambda: None)


def operands(size: tuple[int, int], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, whose rows are strided and begin at any offset; weight, bias."""
    out_size, in_size = size
    x = torch.randn(rows, in_size + 3).to(dtype)[:, 1 : in_size + 1]
    weight = torch.randn(out_size * in_size + 1).to(dtype)[1:].view(out_size, in_size)
    return x, weight, torch.randn(out_size).to(dtype)


@pytest.mark.parametrize(("dtype", "size"), PANEL_SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(library: ctypes.CDLL, dtype: torch.dtype, size: tuple[int, int], has_bias: bool) -> None:
    """Oracle: float64: half a unit of the type, and float32's epsilon of the summands' magnitudes; in 16 bits the mean
    error is that of ``F.linear``."""
    for rows in ROWS:
        x, weight, bias = operands(size, rows, dtype)
        offset = bias if has_bias else torch.zeros_like(bias)
        exact = F.linear(x.double(), weight.double(), offset.double())
        magnitude = F.linear(x.double().abs(), weight.double().abs(), offset.double().abs())
        allowed = torch.finfo(dtype).eps / 2 * exact.abs() + ERROR_UNITS * torch.finfo(torch.float32).eps * magnitude
        found = PackedWeight(library, weight)(x, bias if has_bias else None)
        assert found.dtype is dtype
        error = (found.double() - exact).abs()
        assert (error <= allowed + torch.finfo(dtype).smallest_normal).all()
        if dtype is not torch.float32:
            usual = (F.linear(x, weight, offset).double() - exact).abs().mean()
            assert error.mean() <= 1.01 * usual + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_s_result_depends_on_nothing_else(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Oracle: its own result: with one, two and three threads, alone or in a batch, equal bit by bit."""
    for in_size in (1100, 2500):
        x, weight, bias = operands((131, in_size), 200, dtype)
        product = PackedWeight(library, weight)
        torch.set_num_threads(1)
        whole = product(x, bias)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(product(x, bias), whole)
        for row in (0, 17, 199):
            assert torch.equal(product(x[row : row + 1], bias), whole[row : row + 1])
            assert torch.equal(product(x[row : row + 1].expand(9, -1), bias)[8], whole[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Oracle: ``F.linear``: NaN and infinities of the weight, in whole vectors and in the rest of a row."""
    x, weight = torch.ones(7, 76, dtype=dtype), torch.ones(6, 76, dtype=dtype)
    weight[1, 2], weight[2, 75] = float("nan"), float("nan")
    weight[3, 40], weight[4, 70] = float("inf"), float("-inf")
    torch.testing.assert_close(PackedWeight(library, weight)(x, None), F.linear(x, weight), equal_nan=True)


def test_columns_that_are_not_neighbours(library: ctypes.CDLL) -> None:
    """Oracle: ``F.linear``."""
    x, weight = torch.randn(40, 3).T, torch.randn(5, 40)
    torch.testing.assert_close(PackedWeight(library, weight)(x, None), F.linear(x, weight))


@pytest.mark.usefixtures("any_library")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chosen_method_equals_the_plain_product(dtype: torch.dtype) -> None:
    """Oracle: the product in float64, to within the type's rounding; with the compiled kernels and without."""
    weight, bias = torch.randn(96, 64, dtype=dtype), torch.randn(96, dtype=dtype)
    method = choose_product(weight)
    for rows in (0, 1, 2, 16, 17, 33, 100):
        for offset in (None, bias):
            x = torch.randn(rows, 64, dtype=dtype)
            expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
            found = method(x, offset)
            assert found.dtype == dtype and found.shape == (rows, 96)
            torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_methods_that_can_not_be_trusted_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: without C and oneDNN's functions, or if they compute wrong results, the plain product is chosen.  Among
    the wrong ones are two that are right by a bound of the largest value."""
    monkeypatch.setattr(dense, "native_library", lambda: None)
    weight = torch.randn(31, 17)

    class Missing(PackedLinear):
        def __init__(self, weight: torch.Tensor) -> None:
            raise RuntimeError("not compiled with oneDNN")

    class Wrong(PackedLinear):
        def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return F.linear(x, weight, bias) * 1.001

    class OffByATenthOfItsSpread(PackedLinear):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__(weight + 0.1 * weight.float().std().to(weight.dtype))

    class OneWrongResult(PackedLinear):
        def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            found = super().__call__(x, bias)
            smallest = found[0].abs().argmin()
            found[0, smallest] += 0.02 * found.abs().max().to(found.dtype)
            return found

    for broken in (Missing, Wrong):
        monkeypatch.setattr(dense, "PackedLinear", broken)
        monkeypatch.setattr(dense, "_trusted", {})
        assert isinstance(choose_product(weight), PlainLinear)
    assert isinstance(choose_product(weight.half()), PlainLinear)
    weight = (torch.randn(96, 576) * 0.02).bfloat16()
    assert dense._agrees(PackedLinear(weight), weight)
    assert not dense._agrees(OneWrongResult(weight), weight)
    assert not dense._agrees(OffByATenthOfItsSpread(weight), weight)


@pytest.mark.parametrize("matrices", [False, True])
def test_the_choice_by_type_and_processor(
    library: ctypes.CDLL, matrices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the table in the module's description."""
    monkeypatch.setattr(dense, "native_library", lambda: library)
    monkeypatch.setattr(dense, "multiplies_bfloat16_matrices", lambda: matrices)
    weight = torch.randn(48, 32)
    assert isinstance(choose_product(weight), PackedWeight)
    expected = PackedLinear if matrices else PackedWeight
    assert isinstance(choose_product(weight.bfloat16()), expected)
    odd = choose_product(weight[:, :31].contiguous().bfloat16())
    assert isinstance(odd, PackedLinear)
    assert isinstance(choose_product(weight.half()), PackedWeight)
    assert isinstance(choose_product(weight[:, :31].contiguous().half()), PlainLinear)
    assert isinstance(choose_product(weight.double()), PlainLinear)
    assert isinstance(choose_product(weight.to("meta")), PlainLinear)
    for dtype, gated in ((torch.float32, PackedWeight), (torch.bfloat16, expected), (torch.float16, PackedWeight)):
        method = choose_product(weight.to(dtype), SILU)
        assert isinstance(method, PackedWeight if gated is PackedWeight else ThenGate)


@pytest.mark.usefixtures("any_library")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_head_and_its_embedding_have_one_weight(dtype: torch.dtype) -> None:
    """Oracle: the weight that both got; plain or in panels, C reads the one copy."""
    context = LayerContext(
        communicator=SingleRank(), dtype=dtype, device=torch.device("cpu"), format_of=choose_formats(None)
    )
    embedding = VocabParallelEmbedding(203, 8, context=context)
    head = ParallelLMHead(203, 8, context=context, tied=embedding)
    assert embedding.weight is not None and not list(head.parameters())
    weight = torch.randn(embedding.weight.shape).to(dtype)
    embedding.weight.copy_(weight)
    head.finish_loading()
    assert isinstance(head.loaded, PackedWeight) == (embedding.weight is None)
    ids = torch.tensor([0, 202, 63, 64, 1, 129, 0])
    for wanted in (ids, ids.int()):
        assert torch.equal(embedding(wanted), weight[ids])
    for rows in (2, 30):
        hidden = torch.randn(rows, 8).to(dtype)
        expected = F.linear(hidden.double(), weight[:203].double())
        torch.testing.assert_close(head(hidden).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 2048])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_in_panels(library: ctypes.CDLL, dtype: torch.dtype, size: int, has_bias: bool) -> None:
    """Oracle: SwiGLU's kernel after the product in panels, and that product, bit by bit, NaN too; sizes that do not
    fill a panel."""
    x, weight, bias = operands((2 * size, 76), 200, dtype)
    weight[0, 3], weight[size, 70] = float("inf"), float("nan")
    separate, gated = PackedWeight(library, weight), PackedWeight(library, weight, activation=SILU)
    native_gate = implementation("gate", "native")
    for rows in (0, 1, 5, 6, 7, 97, 200):
        offset = bias if has_bias else None
        both = separate(x[:rows], offset)
        for found, expected in (
            (gated.before_activation(x[:rows], offset), both),
            (gated(x[:rows], offset), native_gate(both, SILU)),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("any_library")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up_by_the_chosen_method(dtype: torch.dtype) -> None:
    """Oracle: SwiGLU in float64, to within the type's rounding of each half and of the result."""
    x, weight, bias = torch.randn(9, 64, dtype=dtype), torch.randn(96, 64, dtype=dtype), torch.randn(96, dtype=dtype)
    method = choose_product(weight / 8, SILU)
    expected = gate(F.linear(x.double(), weight.double() / 8, bias.double()), SILU)
    found = method(x, bias)
    assert found.dtype == dtype and found.shape == (9, 48)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=max(8 * eps, 1e-4))


def test_rows_of_a_part_of_the_vocabulary(library: ctypes.CDLL) -> None:
    """Oracle: ``embed``: ids below and above those of the weight give zeros; enough ids for two threads."""
    weight = torch.randn(80, 50)
    ids = torch.arange(700, dtype=torch.int32) % 130
    assert torch.equal(PackedWeight(library, weight).rows(ids, 20), embed(ids, weight, 20))
