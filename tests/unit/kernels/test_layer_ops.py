"""Every operation of the layers, as its twin and in C, against its formula in float64 (row B9).

The rule: the twin is right to within the type's rounding, and the error of C is at most twice the twin's, or one unit
of float32 more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from tp_engine.cpu.library import native_library
from tp_engine.cpu.linear import PackedWeight
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import Kind, implementation
from tp_engine.model_config.head_gate import GateFunction
from tp_engine.model_config.mlp import Activation, ActivationKind

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 48), (7, 100), (33, 1024)]
EPS = 1e-5
HEADS, KV_HEADS = 6, 2
MAX_LEN = 50

Change = Callable[..., torch.Tensor]
"""Calls an operation on inputs of its own, and returns what it made or changed."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> None:
    """The number of threads that C may use."""
    torch.set_num_threads(request.param)


def compare(name: str, change: Callable[[Callable[..., Any]], torch.Tensor], exact: torch.Tensor) -> None:
    """``change(operation)`` against ``exact``, in float64, by each implementation that runs on CPUs."""
    twin = change(implementation(name, "twin"))
    eps = torch.finfo(twin.dtype).eps
    largest = exact.abs().max().item() if exact.numel() else 0.0
    allowed = 4 * eps * max(largest, 1.0) + 1e-6
    plain = error(twin, exact)
    assert plain <= allowed, f"the twin of {name} is off by {plain}, more than {allowed}"
    if native_library() is None:
        return
    found = change(implementation(name, "native"))
    assert found.dtype == twin.dtype and found.shape == twin.shape
    granted = 1e-6 + torch.finfo(torch.float32).eps * largest
    assert error(found, exact) <= 2 * plain + granted, f"{error(found, exact)} is more than twice {plain}"


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return (found.double() - exact).abs().max().item() if exact.numel() else 0.0


def normalised(x: torch.Tensor, rule: NormRule) -> torch.Tensor:
    wide = x.double()
    if rule.is_centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * (wide.square().mean(-1, keepdim=True) + rule.eps).rsqrt() * (rule.weight.double() + rule.offset)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("offset", "is_centred"), [(0.0, False), (1.0, False), (0.0, True), (1.0, True)])
def test_norm(dtype: torch.dtype, size: tuple[int, int], offset: float, is_centred: bool) -> None:
    """Oracle: the formula; rows far from zero, whose mean must be subtracted."""
    rule = NormRule(torch.randn(size[1]).to(dtype), EPS, offset, is_centred)
    x = (torch.randn(size) + 3).to(dtype)
    compare("norm", lambda norm: norm(x, rule), normalised(x, rule))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.22, 1.0), (1.0, 0.37)])
def test_add(dtype: torch.dtype, size: tuple[int, int], scales: tuple[float, float]) -> None:
    """Oracle: the formula; the sum by itself, and the norm of the stored sum."""
    x, residual = torch.randn(2, *size).to(dtype)
    exact = (residual.double() + x.double() * scales[0]) * scales[1]

    def added(add: Callable[..., None]) -> torch.Tensor:
        own: torch.Tensor = residual.clone()
        add(x, own, *scales)
        return own

    compare("add", added, exact)
    rule = NormRule(torch.randn(size[1]).to(dtype), EPS, 1.0)

    def summed(add_norm: Change) -> torch.Tensor:
        own: torch.Tensor = residual.clone()
        add_norm(x, own, rule, *scales)
        return own

    compare("add_norm", summed, exact)
    stored = residual.clone()
    implementation("add", "twin")(x, stored, *scales)
    compare("add_norm", lambda add_norm: add_norm(x, residual.clone(), rule, *scales), normalised(stored, rule))


def gated(gate_up: torch.Tensor, rule: Activation) -> torch.Tensor:
    if rule.kind == "relu2":
        return gate_up.double().clamp(min=0) ** 2
    gate, up = gate_up.double().chunk(2, -1)
    if rule.kind == "silu":
        return gate * gate.sigmoid() * up
    if rule.kind == "gelu_tanh":
        return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    kept = gate.clamp(max=rule.limit)
    if rule.kind == "silu_clamped":
        return kept * kept.sigmoid() * up.clamp(-rule.limit, rule.limit)
    return (up.clamp(-rule.limit, rule.limit) + 1) * kept * (rule.alpha * kept).sigmoid()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (40, 520)])
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_gate(dtype: torch.dtype, size: tuple[int, int], kind: ActivationKind) -> None:
    """Oracle: the formula; values on both sides of the clamped one's limits."""
    rule = Activation(kind, alpha=1.5, limit=5.0)
    gate_up = (torch.randn(size[0], rule.num_parts * size[1]) * 4).to(dtype)
    compare("gate", lambda gate: gate(gate_up, rule), gated(gate_up, rule))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", get_args(GateFunction))
@pytest.mark.parametrize("per_head", [False, True])
def test_gate_heads(dtype: torch.dtype, size: tuple[int, int], per_head: bool, function: GateFunction) -> None:
    """Oracle: the formula; the gate's rows are parts of longer ones, and some of its elements are large."""
    dim = next(one for one in (4, 3, 2, 1) if size[1] % one == 0) if per_head else 1
    count = size[1] // dim
    x, wide = torch.randn(*size).to(dtype), (torch.randn(size[0], size[1] + count) * 12).to(dtype)
    gate = wide[:, size[1] :]

    def gated_by(gate_heads: Callable[..., None]) -> torch.Tensor:
        own: torch.Tensor = x.clone()
        gate_heads(own, gate, function)
        return own

    factor = gate.double().sigmoid() if function == "sigmoid" else (gate.double().exp() + 1).log()
    compare("gate_heads", gated_by, x.double() * factor.repeat_interleave(dim, 1))


@pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_gates_of_extremes(kind: ActivationKind) -> None:
    """Oracle: PyTorch, at values where the exponential leaves float32's range; NaN stays."""
    gate = torch.tensor([[-1e30, -200.0, -88.0, -10.0, -1.0, -0.0, 0.0, 1e-8, 1.0, 88.0, 200.0, 1e18, float("nan")]])
    gate_up, rule = torch.cat((gate, torch.ones_like(gate)), 1), Activation(kind)
    found, expected = (implementation("gate", one)(gate_up, rule) for one in ("native", "twin"))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", get_args(ActivationKind))
@pytest.mark.parametrize("size", [1, 33, 100])
def test_gates_in_panels(dtype: torch.dtype, kind: ActivationKind, size: int) -> None:
    """Oracle: the kernel of the activation after the product in panels, bit by bit."""
    library = native_library()
    if library is None:
        pytest.skip("the native kernels cannot be built here")
    rule, weight, x = Activation(kind, alpha=1.3, limit=2.0), torch.randn(2 * size, 76), torch.randn(97, 76)
    weight, x, bias = weight.to(dtype), x.to(dtype), torch.randn(2 * size).to(dtype)
    separate, together = PackedWeight(library, weight), PackedWeight(library, weight, activation=rule)
    for rows in (1, 6, 97):
        expected = implementation("gate", "native")(separate(x[:rows], bias), rule)
        assert torch.equal(together(x[:rows], bias), expected)


def turned(heads: torch.Tensor, norm: HeadNorm | None, rotation: Rotation | None) -> torch.Tensor:
    """Queries and keys: pairs as complex numbers; a product turns them."""
    wide = heads[:, :-KV_HEADS].double()
    if norm is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        wide = wide * (norm.weights[: wide.shape[1]].double() + norm.offset)
    if rotation is None:
        return wide
    half = rotation.rotary_dim // 2
    angles = rotation.table[rotation.positions].double().unsqueeze(1)
    pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half])
    pairs = pairs * torch.complex(angles[..., :half], angles[..., half:])
    wide = torch.cat((pairs.real, pairs.imag, wide[..., 2 * half :]), -1)
    if rotation.query_scale is not None:
        wide[:, :HEADS] *= rotation.query_scale[rotation.positions].double().view(-1, 1, 1)
    return wide


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 20), (128, 64), (256, 2), (24, 0), (12, 10)])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_heads(dtype: torch.dtype, head_dim: int, rotary_dim: int, offset: float | None, is_scaled: bool) -> None:
    """Oracle: complex numbers; partly rotated, with and without a norm, queries scaled or not; values are unchanged."""
    heads = torch.randn(40, HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    angles, positions = torch.rand(MAX_LEN, rotary_dim // 2) * 6, torch.randint(MAX_LEN, (40,))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    rotation = Rotation(table, positions, torch.rand(MAX_LEN) + 0.5 if is_scaled else None)
    weights = torch.randn(HEADS + KV_HEADS, head_dim).to(dtype)
    norm = None
    if offset is not None:
        norm = HeadNorm(q_weight=weights[0], k_weight=weights[-1], weights=weights, eps=EPS, offset=offset)

    for own_rotation in (rotation, None):

        def prepared(prepare: Change, own_rotation: Rotation | None = own_rotation) -> torch.Tensor:
            query, key, value = prepare(heads.clone(), KV_HEADS, norm, own_rotation, None, torch.arange(40))
            assert torch.equal(value, heads[:, -KV_HEADS:])
            return torch.cat((query, key), 1)

        compare("qk_norm_rope_store", prepared, turned(heads, norm, own_rotation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(512, 128), (512, 512), (20, 20)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_of_values(dtype: torch.dtype, head_dim: int, rotary_dim: int, offset: float) -> None:
    """Oracle: the formula; values do not turn, queries and keys are as without it."""
    heads, positions = torch.randn(40, HEADS + 2 * KV_HEADS, head_dim).to(dtype), torch.randint(MAX_LEN, (40,))
    rotation = Rotation(torch.randn(MAX_LEN, rotary_dim).to(dtype), positions, torch.rand(MAX_LEN) + 0.5)
    weights = torch.randn(HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    weights[-KV_HEADS:] = 1.0 - offset
    norm = HeadNorm(
        q_weight=weights[0], k_weight=weights[HEADS], weights=weights, eps=EPS, offset=offset, includes_values=True
    )
    values = heads[:, -KV_HEADS:].double()
    values = values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt()

    def prepared(prepare: Change) -> torch.Tensor:
        return torch.cat(tuple(prepare(heads.clone(), KV_HEADS, norm, rotation, None, torch.arange(40))), 1)

    compare("qk_norm_rope_store", prepared, torch.cat((turned(heads, norm, rotation), values), 1))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 128), (40, 64), (3, 20)])
def test_norm_of_all_heads(dtype: torch.dtype, num_tokens: int, head_dim: int) -> None:
    """Oracle: one norm over a token's queries and one over its keys; on two ranks, the sums of both."""
    heads = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    weights = torch.randn(HEADS + KV_HEADS, head_dim).to(dtype)
    wide = heads.double()
    parts = wide[:, :HEADS], wide[:, HEADS:-KV_HEADS]
    squares = torch.stack([part.square().sum((1, 2)) for part in parts], 1)
    compare("head_squares", lambda op: op(heads, HEADS, KV_HEADS), squares)
    others = torch.rand(num_tokens, 2) * 100
    widths = (2 * HEADS * head_dim, 2 * KV_HEADS * head_dim)
    total = squares.float() + others
    factors = (total.double() / torch.tensor(widths) + EPS).rsqrt()
    exact = torch.cat((parts[0] * factors[:, :1, None], parts[1] * factors[:, 1:, None]), 1) * weights.double()

    def weighted(norm_width: Callable[..., None]) -> torch.Tensor:
        own = heads.clone()
        norm_width(own, HEADS, KV_HEADS, total, weights, widths, EPS)
        assert torch.equal(own[:, -KV_HEADS:], heads[:, -KV_HEADS:])
        return own[:, :-KV_HEADS]

    compare("norm_width", weighted, exact)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 32.0, 0.3])
def test_embed(dtype: torch.dtype, scale: float) -> None:
    """Oracle: the weight's rows; for a part of the vocabulary, plain and in panels, zeros for the other ids."""
    weight = torch.randn(80, 50).to(dtype)
    ids = torch.arange(700, dtype=torch.int32) % 130
    is_mine = ((ids >= 20) & (ids < 100)).unsqueeze(1)
    exact = torch.where(is_mine, weight.double()[(ids - 20).clamp(0, 79)] * scale, 0.0)
    compare("embed", lambda embed: embed(ids, weight, 20, scale), exact)
    assert error(implementation("embed", "twin")(ids[:80], weight, None, scale), weight.double() * scale) <= 0.1
    library = native_library()
    if library is not None:
        expected = implementation("embed", "twin")(ids, weight, 20, scale)
        torch.testing.assert_close(PackedWeight(library, weight).rows(ids, 20, scale), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 5), (3, 1000), (2, 9000)])
@pytest.mark.parametrize("cap", [None, 0.5, 30.0])
def test_cap_logits(dtype: torch.dtype, size: tuple[int, int], cap: float | None) -> None:
    """Oracle: the formula; rows are parts of wider rows, whose rest is unchanged, and -inf gives -cap."""
    wide = (torch.randn(size[0], size[1] + 7) * 20).to(dtype)
    wide[0, :2] = torch.tensor([float("-inf"), 1e-6])
    if cap is None:
        wide[0, 0] = -100
    exact = wide[:, : size[1]].double() * 0.6
    if cap is not None:
        exact = cap * torch.tanh(exact / cap)

    def capped(cap_logits: Callable[..., None]) -> torch.Tensor:
        own = wide.clone()
        cap_logits(own[:, : size[1]], 0.6, cap)
        assert torch.equal(own[:, size[1] :], wide[:, size[1] :])
        return own[:, : size[1]]

    compare("cap_logits", capped, exact)


@pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
def test_tanh_is_as_exact_as_pytorch_s() -> None:
    """Oracle: float64: over many numbers of all sizes, the largest relative error is at most twice PyTorch's and a
    unit, because on some processors PyTorch's is half of one."""
    x = torch.cat([torch.randn(1, 20000) * size for size in (1e-4, 1e-2, 0.1, 0.5, 1.0, 4.0, 30.0)], 1)
    exact, errors = x.double().tanh(), []
    for kind in ("twin", "native"):
        own = x.clone()
        implementation("cap_logits", kind)(own, 1.0, 1.0)
        errors.append(((own.double() - exact) / exact).abs().max().item())
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", ["twin", "native"])
def test_rows_that_lie_apart_are_copied(kind: Kind) -> None:
    """Oracle: the same rows; what is beside them stays."""
    if kind == "native" and native_library() is None:
        pytest.skip("the native kernels cannot be built here")
    source, target = torch.randn(5, 48), torch.zeros(5, 40)
    implementation("copy_rows", kind)(source[:, 8:24], target[:, 20:36])
    assert torch.equal(target[:, 20:36], source[:, 8:24])
    assert not target[:, :20].any() and not target[:, 36:].any()
