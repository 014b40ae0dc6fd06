"""Experts: the routing of tokens, how checkpoints store experts and ranks share them, and the C kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.kernels.kernel_cases_experts import CLAMPED, RELU2, RULES, make_ids, make_weights
from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, random
from tests.unit.models.test_weights import empty_parameters
from tp_engine.cpu.experts import NativeExperts
from tp_engine.cpu.library import native_library
from tp_engine.errors import ConfigError, WeightError
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.experts import routing
from tp_engine.kernels.experts.experts import ExpertWeights, mix_experts
from tp_engine.kernels.ops import implementation
from tp_engine.layers.quantization.base import ExpertsProduct
from tp_engine.layers.quantization.experts import share_experts
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.mlp import (
    EACH,
    FUSED,
    NUMBERED,
    SILU,
    TRANSPOSED,
    Activation,
    ExpertsSpec,
    RoutingRule,
    StoredExperts,
    block_bounds,
    local_inner_size,
)
from tp_engine.weights.loader import load_weights
from tp_engine.weights.source import Source, set_sources

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
}


def route_by_hand(logits: list[float], rule: RoutingRule, correction: list[float]) -> list[tuple[int, float]]:
    """(expert, weight) pairs of one token, in Python's own floats."""
    largest = max(logits)
    exponentials = [math.exp(value - largest) for value in logits]
    scores = {
        "softmax": [value / sum(exponentials) for value in exponentials],
        "sigmoid": [1 / (1 + math.exp(-value)) for value in logits],
        "softmax_of_chosen": list(logits),
    }[rule.scores]
    choice = [score + extra for score, extra in zip(scores, correction, strict=True)]
    if rule.num_groups > 1:
        size = len(choice) // rule.num_groups
        groups = [choice[start : start + size] for start in range(0, len(choice), size)]
        worth = [sum(sorted(group)[-rule.group_best :]) for group in groups]
        kept = sorted(range(rule.num_groups), key=lambda group: (-worth[group], group))[: rule.top_groups]
        choice = [value if index // size in kept else -math.inf for index, value in enumerate(choice)]
    chosen = sorted(range(len(choice)), key=lambda expert: (-choice[expert], expert))[: rule.top_k]
    weights = [scores[expert] for expert in chosen]
    if rule.scores == "softmax_of_chosen":
        weights = [math.exp(weight) / sum(math.exp(one) for one in weights) for weight in weights]
    if rule.renormalises:
        weights = [weight / (sum(weights) + rule.sum_eps) for weight in weights]
    return [(expert, weight * rule.factor) for expert, weight in zip(chosen, weights, strict=True)]


@pytest.mark.parametrize("kind", ["twin", "native"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_routing(kind: Any, rule: RoutingRule) -> None:
    """Oracle: the formulas in plain Python; equal scores go to the lower id."""
    logits, correction = random((40, 12), torch.float32, "cpu"), random((12,), torch.float32, "cpu", 1) * 0.1
    logits[3] = 0.25
    logits[4, 5] = logits[4, 7] = 9.0
    for extra in (None, correction):
        ids, weights = implementation("route", kind)(logits, rule, extra)
        for row, own in enumerate(logits.tolist()):
            expected = route_by_hand(own, rule, [0.0] * 12 if extra is None else extra.tolist())
            assert ids[row].tolist() == [expert for expert, _ in expected], row
            assert weights[row].tolist() == pytest.approx([weight for _, weight in expected], rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_routing_of_every_type(dtype: torch.dtype) -> None:
    """Oracle: the twin, for logits that are slices of wider rows; with NaN the ids are still valid."""
    logits = random((9, 70), dtype, "cpu")[:, :60]
    for rule in RULES.values():
        loads = [routing.ExpertLoad(torch.zeros(60, dtype=torch.int64), torch.arange(9) - 2) for _ in range(2)]
        found = implementation("route", "native")(logits, rule, None, loads[0])
        expected = routing.route(logits, rule, None, loads[1])
        assert torch.equal(loads[0].counts, loads[1].counts) and loads[0].counts.sum() == 7 * rule.top_k
        assert torch.equal(found[0], expected[0]) and torch.allclose(found[1], expected[1], rtol=1e-5)
    broken = torch.full((1, 60), torch.nan, dtype=dtype)
    ids, _ = implementation("route", "native")(broken, RULES["softmax"], None)
    assert ids.tolist() == [[0, 1, 2]]


def native_experts(weights: ExpertWeights[torch.Tensor], top_k: int) -> NativeExperts:
    """The experts in panels."""
    library = native_library()
    assert library is not None
    return NativeExperts(library, weights, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "bias"), [(SILU, False), (CLAMPED, True), (RELU2, True)])
@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "spread"), (7, "even"), (130, "one"), (300, "spread")])
def test_native_experts(num_tokens: int, kind: str, activation: Activation, bias: bool, dtype: torch.dtype) -> None:
    """Oracle: the twin in float64; one expert with all tokens (more than a group of tiles), and experts without
    tokens."""
    weights = make_weights(8, 72, 40, dtype, "cpu", bias=bias, activation=activation)
    x, ids = random((num_tokens, 72), dtype, "cpu"), make_ids(kind, num_tokens, 3, 8, "cpu")
    shares = random((num_tokens, 3), torch.float32, "cpu", 5).sigmoid()
    wide = ExpertWeights(
        gate_up=weights.gate_up.double(),
        down=weights.down.double(),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.double(),
        down_bias=None if weights.down_bias is None else weights.down_bias.double(),
        first=0,
        activation=weights.activation,
    )
    exact = mix_experts(x.double(), ids, shares, wide)
    found, twin = native_experts(weights, 3)(x, ids, shares), mix_experts(x, ids, shares, weights)
    assert_close_enough(found, twin, exact, granted=exact.abs().max().item() * 4)


def assert_rows_are_their_own(
    product: ExpertsProduct, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
) -> None:
    """Oracle: rows alone, and all of them with one thread, bit by bit."""
    whole = product(x, ids, shares)
    for row in (0, len(x) // 2, len(x) - 1):
        own = slice(row, row + 1)
        assert torch.equal(product(x[own], ids[own], shares[own]), whole[own])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(product(x, ids, shares), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_is_its_own(dtype: torch.dtype) -> None:
    """Oracle: the same row alone, bit by bit, with one thread and with several."""
    weights = make_weights(6, 72, 40, dtype, "cpu", bias=True)
    ids, shares = make_ids("spread", 90, 2, 6, "cpu"), random((90, 2), torch.float32, "cpu", 5)
    assert_rows_are_their_own(native_experts(weights, 2), random((90, 72), dtype, "cpu"), ids, shares)


def test_experts_of_other_ranks_add_nothing() -> None:
    """Oracle: the sum over two ranks with half of the experts each equals the whole."""
    weights = make_weights(6, 48, 24, torch.float32, "cpu", bias=True)
    x, ids = random((20, 48), torch.float32, "cpu"), make_ids("spread", 20, 3, 6, "cpu")
    shares = random((20, 3), torch.float32, "cpu", 5)
    assert weights.gate_up_bias is not None and weights.down_bias is not None
    parts = [
        replace(
            weights,
            gate_up=weights.gate_up[first : first + 3],
            down=weights.down[first : first + 3],
            gate_up_bias=weights.gate_up_bias[first : first + 3],
            down_bias=weights.down_bias[first : first + 3],
            first=first,
        )
        for first in (0, 3)
    ]
    found = sum(native_experts(part, 3)(x, ids, shares) for part in parts)
    torch.testing.assert_close(found, mix_experts(x, ids, shares, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operations(dtype: torch.dtype) -> None:
    """Oracle: the twins."""
    total, x, wide = (random((5, 37), dtype, "cpu", seed) for seed in range(3))
    assert torch.equal(implementation("to_float32", "native")(x), x.float())
    found, expected = total.clone(), total.clone()
    implementation("add_gated", "native")(found, x, wide[:, 4:5])
    implementation("add_gated", "twin")(expected, x, wide[:, 4:5])
    torch.testing.assert_close(found, expected)


def test_golden_blocks() -> None:
    """Oracle: worked out by hand; gpt-oss has 2,880 = 90 blocks of 32."""
    assert block_bounds(2880, 4, block=32) == [0, 704, 1440, 2144, 2880]
    eight = [end - start for start, end in pairwise(block_bounds(2880, 8, block=32))]
    assert eight == [352, 352, 352, 384, 352, 352, 352, 384]
    assert block_bounds(2880, 4) == [0, 720, 1440, 2160, 2880]
    assert block_bounds(768, 4) == [0, 192, 384, 576, 768]
    assert block_bounds(40, 3) == [0, 8, 24, 40] and block_bounds(6, 4) == [0, 1, 3, 4, 6]
    assert local_inner_size(2880, 4) == 720 and local_inner_size(40, 3) == 16 and local_inner_size(24, 1) == 24


def store(stored: StoredExperts, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors of gate and up (E, I, H), down (E, H, I), as ``StoredExperts`` draws them."""
    path, suffix = "mlp.", stored.weight_suffix
    if stored.kind == "each":
        named = ((stored.gate, gate), (stored.up, up), (stored.down, down))
        return {
            f"{path}{name.format(index)}{suffix}": one.clone() for name, part in named for index, one in enumerate(part)
        }
    both = torch.stack((gate, up), 2).flatten(1, 2) if stored.interleaved else torch.cat((gate, up), 1)
    if stored.kind == "transposed":
        both, down = both.transpose(1, 2), down.transpose(1, 2)
    return {f"{path}{stored.gate}{suffix}": both.contiguous(), f"{path}{stored.down}{suffix}": down.contiguous()}


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(
    "stored", [EACH, NUMBERED, FUSED, TRANSPOSED, replace(TRANSPOSED, interleaved=True)], ids=lambda one: one.kind
)
def test_every_way_to_store_experts(stored: StoredExperts, splits: bool, tmp_path: Path) -> None:
    """Oracle: slices of the whole tensors by hand, on 3 ranks: parts of 8, 16 and 16 of 40 inner elements, zeros."""
    gate, up = random((5, 40, 12), torch.float32, "cpu", 1), random((5, 40, 12), torch.float32, "cpu", 2)
    down = random((5, 12, 40), torch.float32, "cpu", 3)
    embedding = {"model.embed_tokens.weight": torch.zeros(1)}
    save_file(store(stored, gate, up, down) | embedding, tmp_path / "model.safetensors")
    spec = ExpertsSpec(num_experts=5, inner_size=40, rule=RoutingRule(top_k=2), stored=(stored,))
    model = read_model(QWEN3_MOE)
    for rank in range(3):
        shape = share_experts(spec, 12, "mlp", rank=rank, world_size=3, splits=splits)
        experts = slice(shape.experts.start, shape.experts.start + shape.experts.size)
        inner, size = slice(shape.inner.start, shape.inner.start + shape.inner.size), shape.inner.size
        assert (shape.experts.size, size, shape.room) == (
            (5, (8, 16, 16)[rank], 16) if splits else ((1, 2, 2)[rank], 40, 40)
        )
        parameters = {
            "gate_up": torch.full((shape.experts.size, 2 * shape.room, 12), torch.nan),
            "down": torch.full((shape.experts.size, 12, shape.room), torch.nan),
            "other": torch.full((1,), torch.nan),
        }
        found = {name: torch.nn.Parameter(values, requires_grad=False) for name, values in parameters.items()}
        set_sources(found["gate_up"], shape.weight_sources(stored, shape.gate_up(stored)))
        set_sources(found["down"], shape.weight_sources(stored, shape.down(stored)))
        set_sources(found["other"], (_whole_source("model.embed_tokens.weight"),))
        load_weights(found, model, tmp_path, info=RankInfo(rank=rank, world_size=3))
        padding = shape.room - size
        expected = torch.nn.functional.pad(torch.stack((gate, up), 1)[experts, :, inner], (0, 0, 0, padding))
        assert torch.equal(found["gate_up"].data, expected.flatten(1, 2))
        assert torch.equal(found["down"].data, torch.nn.functional.pad(down[experts, :, inner], (0, padding)))


def _whole_source(name: str) -> Source:
    from tp_engine.weights.source import whole

    return Source(name=name, shape=(1,), taken=whole((1,)), target=whole((1,)))


def test_a_checkpoint_in_either_spelling_is_loaded(tmp_path: Path) -> None:
    """Oracle: a checkpoint with one tensor per expert and one with a single tensor load equal parameters; the error
    names a missing expert."""
    spec = read_model(QWEN3_MOE)
    shapes = {
        source.name: source.shape
        for parameter in empty_parameters(spec, RankInfo()).values()
        for source in parameter._sources[0]  # type: ignore[attr-defined]
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    fused = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(2):

        def stacked(projection: str, layer: int = layer) -> torch.Tensor:
            path = f"model.layers.{layer}.mlp.experts"
            return torch.stack([tensors[f"{path}.{index}.{projection}.weight"] for index in range(6)])

        path = f"model.layers.{layer}.mlp.experts"
        fused[f"{path}.gate_up_proj"] = torch.cat((stacked("gate_proj"), stacked("up_proj")), 1)
        fused[f"{path}.down_proj"] = stacked("down_proj")
    folders = (tmp_path / "each", tmp_path / "fused")
    for folder, content in zip(folders, (tensors, fused), strict=True):
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
    one, other = empty_parameters(spec, RankInfo()), empty_parameters(spec, RankInfo())
    load_weights(one, spec, folders[0], info=RankInfo())
    load_weights(other, spec, folders[1], info=RankInfo())
    assert all(torch.equal(one[name], other[name]) for name in one)
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, folders[0] / "model.safetensors")
    with pytest.raises(WeightError, match=r"missing: model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        load_weights(one, spec, folders[0], info=RankInfo())


def test_what_configurations_say_of_experts() -> None:
    """Oracle: the specification by hand; both spellings of a key; layers without experts."""
    spec = read_model({**QWEN3_MOE, "mlp_only_layers": [0]})
    assert not isinstance(spec.layers[0].mlp, ExpertsSpec)
    mlp = spec.layers[1].mlp
    assert isinstance(mlp, ExpertsSpec)
    assert (mlp.num_experts, mlp.inner_size, mlp.rule) == (6, 24, RoutingRule(top_k=2, renormalises=True))
    other = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"} | {"num_local_experts": 6}
    assert read_model(other) == read_model(QWEN3_MOE)
    with pytest.raises(ConfigError, match="7 of 6 experts are asked for"):
        read_model({**QWEN3_MOE, "num_experts_per_tok": 7})
    with pytest.raises(ConfigError, match="mlp_only_layers is"):
        read_model({**QWEN3_MOE, "mlp_only_layers": [2]})
    with pytest.raises(ConfigError, match=r"router_temperature=0\.5"):
        read_model({**QWEN3_MOE, "router_temperature": 0.5})


def test_which_numbers_of_ranks_are_legal() -> None:
    """Oracle: experts' inner sizes need not be divisible; the shared MLP's must be."""
    spec = read_model({**QWEN3_MOE, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8})
    check_tensor_parallel(spec, 5)
    shared = {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 6}
    with pytest.raises(ConfigError, match="intermediate size of 6 cannot be divided equally"):
        check_tensor_parallel(read_model({**QWEN3_MOE, **shared}), 4)
    with pytest.raises(ConfigError, match="experts' inner size of 2 is smaller"):
        check_tensor_parallel(read_model({**QWEN3_MOE, "moe_intermediate_size": 2}), 4)


MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196_608,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200_064,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201_088,
}


def test_configurations_as_releases_have_them() -> None:
    """Oracle: the released models' numbers by hand; a layer without full attention is refused."""
    spec = read_model(MINIMAX_M2)
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, ExpertsSpec) and (mlp.num_experts, mlp.rule.top_k, mlp.inner_size) == (256, 8, 1536)
    assert spec.ropes[0].rotary_dim == 64 and spec.attentions[0].qk_norm is not None
    with pytest.raises(ConfigError, match="attn_type_list names layers without full attention"):
        read_model({**MINIMAX_M2, "attn_type_list": [1, 0] * 31})
    spec = read_model(GPT_OSS_20B)
    attentions = spec.attentions
    assert [one.window for one in attentions[:3]] == [128, None, 128] and all(one.has_sinks for one in attentions)
    assert spec.ropes[0].kind == "yarn" and not spec.ropes[0].truncate
    check_tensor_parallel(spec, 8)
