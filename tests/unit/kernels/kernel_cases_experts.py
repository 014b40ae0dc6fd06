"""Routing and experts by Triton against their PyTorch twins: interpreted and on CUDA (``CASES``), and the
launches of real models (``launch_all``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, both, random
from tests.unit.kernels.kernel_cases_quantised import E4M3, E8M0, assert_same, make_stack, make_weight
from tp_engine.kernels.experts.experts import ExpertWeights, mix_experts
from tp_engine.kernels.experts.grouped import dense_grouped_experts
from tp_engine.kernels.experts.routing import ExpertLoad
from tp_engine.kernels.ops import implementation
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, dequantise
from tp_engine.model_config.mlp import SILU, Activation, RoutingRule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLAMPED, RELU2 = Activation("swiglu_clamped", alpha=1.7, limit=1.5), Activation("relu2")
RULES = {
    "softmax": RoutingRule(top_k=3),
    "renormalised": RoutingRule(top_k=3, renormalises=True, factor=2.0),
    "of-chosen": RoutingRule(top_k=4, scores="softmax_of_chosen"),
    "sigmoid": RoutingRule(top_k=2, scores="sigmoid", renormalises=True, sum_eps=1e-20, factor=1.5),
    "groups": RoutingRule(top_k=3, scores="sigmoid", renormalises=True, num_groups=4, top_groups=2),
    "groups by the best": RoutingRule(top_k=3, num_groups=4, top_groups=2, group_best=1),
}
Case = Callable[[str], None]


def check_route(device: str, num_experts: int, dtype: torch.dtype, rule: RoutingRule, has_correction: bool) -> None:
    """Ids are equal, weights as close as float32 allows; rows are slices of wider rows, and one has equal logits
    throughout."""
    logits = random((9, num_experts + 1), dtype, device)[:, :num_experts]
    logits[4] = 0.5
    correction = random((num_experts,), torch.float32, device, 1) if has_correction else None
    route, twin = both("route")
    slots = torch.tensor([3, -1, 0, 5, 9, -1, 1, 2, 4], device=device)
    loads = [ExpertLoad(torch.full((num_experts,), 7, device=device), slots) for _ in range(2)]
    (ids, weights) = route(logits, rule, correction, loads[0])
    (expected_ids, expected) = twin(logits, rule, correction, loads[1])
    assert torch.equal(loads[0].counts, loads[1].counts) and loads[0].counts.sum() == 7 * (num_experts + rule.top_k)
    assert torch.equal(ids, expected_ids), (ids, expected_ids)
    assert ids.dtype == torch.int32 and torch.allclose(weights, expected, rtol=1e-5, atol=1e-6)
    assert all(len(part) == 0 for part in route(logits[:0], rule, correction))
    scale = random((num_experts,), torch.float32, device, 2)
    same_ids, scaled = route(logits, rule, correction, None, scale)
    assert torch.equal(same_ids, ids) and torch.allclose(scaled, weights * scale[ids.long()], rtol=1e-5, atol=1e-6)


def make_weights(
    num_experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: str,
    *,
    bias: bool,
    first: int = 0,
    activation: Activation | None = None,
) -> ExpertWeights[torch.Tensor]:
    """Random weights; their usual activation is clamped if they have biases, else SiLU."""
    activation = activation or (CLAMPED if bias else SILU)
    rows = activation.num_parts * inner
    return ExpertWeights(
        gate_up=random((num_experts, rows, hidden), dtype, device, 1),
        down=random((num_experts, hidden, inner), dtype, device, 2),
        gate_up_bias=random((num_experts, rows), dtype, device, 3) if bias else None,
        down_bias=random((num_experts, hidden), dtype, device, 4) if bias else None,
        first=first,
        activation=activation,
    )


def make_ids(kind: str, num_tokens: int, top_k: int, num_experts: int, device: str) -> torch.Tensor:
    """``spread``: random experts; ``one``: all tokens share one; ``even``: only even experts, so the others are
    empty."""
    chosen = torch.stack(
        [
            torch.randperm(num_experts, generator=torch.Generator().manual_seed(token))[:top_k]
            for token in range(num_tokens)
        ]
    )
    if kind == "one":
        chosen[:, 0] = 1
        chosen[:, 1:] = chosen[:, 1:] % (num_experts - 2) + 2
    elif kind == "even":
        chosen = chosen // 2 * 2
    return chosen.to(torch.int32).to(device)


def check_experts(
    device: str,
    num_tokens: int,
    kind: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    bias: bool,
    first: int,
    activation: Activation | None = None,
) -> None:
    """Oracle: the twin in float64.  With ``first``, the ids also name experts of other ranks."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    num_experts, hidden, inner = shape
    weights = make_weights(num_experts, hidden, inner, dtype, device, bias=bias, first=first, activation=activation)
    x = random((num_tokens, hidden), dtype, device)
    ids = make_ids(kind, num_tokens, 3, num_experts + 2 * first, device)
    shares = random((num_tokens, 3), torch.float32, device, 5).sigmoid()
    exact = mix_experts(x.double(), ids, shares, _widened(weights))
    found, twin = TritonExperts(weights)(x, ids, shares), mix_experts(x, ids, shares, weights)
    assert_close_enough(found, twin, exact.double(), granted=exact.abs().max().item() * 4)


def _widened(weights: ExpertWeights[torch.Tensor]) -> ExpertWeights[torch.Tensor]:
    def wide(values: torch.Tensor | None) -> Any:
        return None if values is None else values.double()

    return ExpertWeights(
        gate_up=wide(weights.gate_up),
        down=wide(weights.down),
        gate_up_bias=wide(weights.gate_up_bias),
        down_bias=wide(weights.down_bias),
        first=weights.first,
        activation=weights.activation,
    )


def check_grouped_mm(device: str, first: int) -> None:
    """Oracle: the twin in float64; large prompts through PyTorch's grouped product, here of few pairs."""
    from tp_engine.kernels.experts.experts_triton import LibraryExperts

    weights = make_weights(4, 64, 32, torch.bfloat16, device, bias=False, first=first)
    x, ids = random((30, 64), torch.bfloat16, device), make_ids("spread", 30, 3, 4 + 2 * first, device)
    shares = random((30, 3), torch.float32, device, 5).sigmoid()
    exact = mix_experts(x.double(), ids, shares, _widened(weights))
    product = LibraryExperts(weights, dense_grouped_experts(weights))
    found, twin = product(x, ids, shares), mix_experts(x, ids, shares, weights)
    assert_close_enough(found, twin, exact, granted=exact.abs().max().item() * 4)


def make_quantised(
    shape: tuple[int, int, int],
    kind: Codes,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    *,
    bias: bool,
    activation: Activation | None = None,
) -> ExpertWeights[QuantisedWeight]:
    """Random weights; as ``make_weights``."""
    num_experts, hidden, inner = shape
    activation = activation or (CLAMPED if bias else SILU)
    rows = activation.num_parts * inner
    return ExpertWeights(
        gate_up=make_weight(kind, (num_experts, rows, hidden), device, **options),
        down=make_weight(kind, (num_experts, hidden, inner), device, **options),
        gate_up_bias=random((num_experts, rows), dtype, device, 3) if bias else None,
        down_bias=random((num_experts, hidden), dtype, device, 4) if bias else None,
        first=0,
        activation=activation,
    )


def check_quantised(
    device: str,
    num_tokens: int,
    kind_of_ids: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kind: Codes,
    options: dict[str, Any],
    bias: bool,
    activation: Activation | None,
) -> None:
    """Oracle: the twin in float64; the last row alone gives the same."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    weights = make_quantised(shape, kind, options, dtype, device, bias=bias, activation=activation)
    x, ids = random((num_tokens, shape[1]), dtype, device), make_ids(kind_of_ids, num_tokens, 3, shape[0], device)
    shares = random((num_tokens, 3), torch.float32, device, 5).sigmoid()
    dense = ExpertWeights(
        gate_up=dequantise(weights.gate_up),
        down=dequantise(weights.down),
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        first=0,
        activation=weights.activation,
    )
    exact = mix_experts(x.double(), ids, shares, _widened(dense))
    product = TritonExperts(weights)
    found, twin = product(x, ids, shares), mix_experts(x, ids, shares, weights)
    assert_close_enough(found, twin, exact.double(), granted=exact.abs().max().item() * 4)
    last = slice(num_tokens - 1, num_tokens)
    assert_same(product(x[last], ids[last], shares[last]), found[last])


def check_batches(device: str, dtype: torch.dtype) -> None:
    """A row's result is bit by bit the same alone and in a batch that shares its tiles."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    weights = make_weights(4, 48, 40, dtype, device, bias=True)
    product, x = TritonExperts(weights), random((20, 48), dtype, device)
    ids, shares = make_ids("spread", 20, 2, 4, device), random((20, 2), torch.float32, device, 5)
    whole = product(x, ids, shares)
    for row in (0, 7, 19):
        rows = slice(row, row + 1)
        assert torch.equal(product(x[rows], ids[rows], shares[rows]), whole[rows])


def check_add_gated(device: str, width: int, dtype: torch.dtype) -> None:
    """Gates are a column of wider rows."""
    add_gated, twin = both("add_gated")
    total, x, gates = (random((5, width), dtype, device, seed) for seed in range(3))
    found, expected = total.clone(), total.clone()
    add_gated(found, x, gates[:, 3:4])
    twin(expected, x, gates[:, 3:4])
    exact = total.double() + x.double() * gates[:, 3:4].double().sigmoid()
    assert_close_enough(found, expected, exact, granted=exact.abs().max().item())


def make_cases() -> dict[str, Case]:
    """Name -> check on a device."""
    cases: dict[str, Case] = {}
    for name, rule in RULES.items():
        for num_experts, dtype, has_correction in ((32, torch.float32, True), (60, torch.bfloat16, False)):
            label = f"route-{name}-{num_experts}-{dtype}"
            cases[label] = partial(
                check_route, num_experts=num_experts, dtype=dtype, rule=rule, has_correction=has_correction
            )
    # tokens, kind of ids, (experts, hidden, inner), dtype, biases, first expert
    for settings in (
        (1, "spread", (8, 96, 40), torch.float32, False, 0),
        (5, "spread", (6, 72, 24), torch.bfloat16, True, 0),
        (40, "one", (5, 64, 48), torch.float32, True, 0),
        (70, "even", (6, 64, 32), torch.float16, False, 0),
        (33, "spread", (4, 80, 40), torch.float32, True, 2),
        (300, "spread", (3, 32, 16), torch.float32, False, 0),
        (20, "spread", (6, 72, 40), torch.bfloat16, True, 0, RELU2),
    ):
        num_tokens, kind, shape, dtype, bias, first, *rest = settings
        label = "experts-" + "-".join(str(setting) for setting in settings[:6]) + "-relu2" * len(rest)
        cases[label] = partial(
            check_experts, num_tokens=num_tokens, kind=kind, shape=shape, dtype=dtype, bias=bias, first=first,
            activation=RELU2 if rest else None,
        )  # fmt: skip
    blocks: dict[str, Any] = {"group": 16, "row_block": 16}
    # tokens, kind of ids, (experts, hidden, inner), dtype, codes, what the weights have, biases, activation
    quantised: tuple[tuple[int, str, tuple[int, int, int], torch.dtype, Codes, dict[str, Any], bool, Any], ...] = (
        (1, "spread", (8, 96, 40), torch.float32, "int4", {"group": 8, "zeros": True}, False, None),
        (40, "one", (5, 64, 48), torch.bfloat16, "int4", {"group": 32, "scales": torch.bfloat16}, False, None),
        (70, "even", (6, 64, 32), torch.float32, "e4m3", blocks, True, None),
        (5, "spread", (6, 72, 24), torch.float16, "e4m3", {"factors": True}, False, RELU2),
        (7, "spread", (4, 96, 64), torch.bfloat16, "e4m3", {"group": 32, "scales": E8M0}, True, None),
        (33, "spread", (4, 96, 64), torch.bfloat16, "e2m1", {"group": 32, "scales": E8M0}, True, None),
        (9, "even", (6, 80, 48), torch.float16, "e2m1", {"group": 16, "scales": E4M3, "factors": True}, False, RELU2),
        (300, "spread", (3, 32, 16), torch.float32, "int8", {"group": 16, "zeros": True}, False, None),
    )
    for num_tokens, kind, shape, dtype, codes, options, bias, activation in quantised:
        cases[f"quantised-experts-{num_tokens}-{kind}-{shape}-{dtype}-{codes}"] = partial(
            check_quantised, num_tokens=num_tokens, kind_of_ids=kind, shape=shape, dtype=dtype, kind=codes,
            options=options, bias=bias, activation=activation,
        )  # fmt: skip
    for first in (0, 2):
        cases[f"grouped-mm-from-{first}"] = partial(check_grouped_mm, first=first)
    for dtype in DTYPES[:2]:
        cases[f"batches-{dtype}"] = partial(check_batches, dtype=dtype)
    for dtype in DTYPES:
        cases[f"add-gated-{dtype}"] = partial(check_add_gated, width=1500, dtype=dtype)
    return cases


CASES = make_cases()


def launch_all() -> None:
    """A layer of Qwen3-30B-A3B, of gpt-oss-20b on one of 4 ranks, of GLM-4.5-Air, of Qwen1.5-MoE; every tile size of
    one.  gpt-oss-20b with quantised weights; every tile size of those it is released with."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    for num_experts, hidden, inner, rule, activation, bias in (
        (128, 2048, 768, RoutingRule(top_k=8, renormalises=True), SILU, False),
        (32, 2880, 736, RoutingRule(top_k=4, scores="softmax_of_chosen"), Activation("swiglu_clamped"), True),
        (128, 4096, 1408, RoutingRule(top_k=8, scores="sigmoid", renormalises=True, factor=2.5), SILU, False),
        (60, 2048, 1408, RoutingRule(top_k=4), SILU, False),
    ):

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        weights = ExpertWeights(
            gate_up=empty(num_experts, 2 * inner, hidden),
            down=empty(num_experts, hidden, inner),
            gate_up_bias=empty(num_experts, 2 * inner) if bias else None,
            down_bias=empty(num_experts, hidden) if bias else None,
            first=0,
            activation=activation,
        )
        correction = empty(num_experts, dtype=torch.float32) if rule.scores == "sigmoid" else None

        def load_of(num_experts: int, num_tokens: int) -> ExpertLoad:
            return ExpertLoad(empty(num_experts, dtype=torch.int64), empty(num_tokens, dtype=torch.int64))

        for num_tokens in (1, 64, 512, 2048) if bias else (1,):
            ids, shares = implementation("route", "triton")(
                empty(num_tokens, num_experts), rule, correction, load_of(num_experts, num_tokens)
            )
            x = empty(num_tokens, hidden)
            TritonExperts(weights)(x, ids, shares)
            implementation("add_gated", "triton")(x, x, empty(num_tokens, num_experts + 1)[:, num_experts:])
    kinds: tuple[tuple[Codes, dict[str, Any]], ...] = (
        ("int4", {"group": 32, "scales": torch.bfloat16}), ("e4m3", {"group": 128, "row_block": 128}),
        ("e2m1", {"group": 32, "scales": E8M0}), ("e2m1", {"group": 16, "scales": E4M3, "factors": True}),
    )  # fmt: skip
    for number, (kind, options) in enumerate(kinds):
        has_bias = number == 2
        experts = ExpertWeights(
            gate_up=make_stack(kind, (32, 2 * 736, 2880), **options),
            down=make_stack(kind, (32, 2880, 736), **options),
            gate_up_bias=empty(32, 2 * 736) if has_bias else None,
            down_bias=empty(32, 2880) if has_bias else None,
            first=0,
            activation=CLAMPED if has_bias else SILU,
        )
        for num_tokens in (1, 64, 512, 2048) if has_bias else (1,):
            x, ids = empty(num_tokens, 2880), empty(num_tokens, 4, dtype=torch.int32)
            TritonExperts(experts)(x, ids, empty(num_tokens, 4, dtype=torch.float32))


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
