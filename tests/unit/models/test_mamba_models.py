"""Models most of whose layers are state space layers (Nemotron-H, of one block each, and Granite 4): their description,
their sizes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.unit.apps.advice.test_recommend import SEVEN_B
from tests.unit.models.test_shard import sources
from tests.unit.models.test_weight_sizes import parameters
from tp_engine import recommend
from tp_engine.errors import ConfigError
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.recurrent import Mamba2Spec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.weight_sizes import local_parameters, local_weight_bytes
from tp_engine.system.units import MIB
from tp_engine.weights.source import Span

# Of Nemotron 3 Nano 30B-A3B.
NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 262144,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_theta": 10000,
    "partial_rotary_factor": 1.0,
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": False,
}
SUPER = {
    **NANO,
    "hidden_size": 4096,
    "num_hidden_layers": 88,
    "hybrid_override_pattern": "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
}
# Nemotron-H 56B, of 2025: dense, older spellings, keys of experts absent.
OLD = {key: value for key, value in NANO.items() if "expert" not in key and key not in ("head_dim", "norm_eps")} | {
    "hidden_size": 8192,
    "num_hidden_layers": 118,
    "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
    "attention_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 32768,
    "mamba_num_heads": 256,
    "ssm_state_size": 256,
}
SMALL = {
    **SUPER,
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "M-*ME",
    "vocab_size": 128,
    "hidden_size": 64,
    "head_dim": 8,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "mamba_num_heads": 16,
    "mamba_head_dim": 4,
    "ssm_state_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
# Granite 4.0 H Small.
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100352,
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "embedding_multiplier": 12,
    "logits_scaling": 16,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "normalization_function": "rmsnorm",
}


@pytest.mark.parametrize(
    ("config", "kinds", "billions", "active", "state_mib", "kv_bytes"),
    [
        (NANO, (23, 6, 23, 0), 31.6, 3.6, 47.6, 6144),
        (SUPER, (40, 8, 40, 0), 120.6, 12.7, 164.7, 8192),
        (OLD, (54, 10, 0, 54), 56.3, 56.3, 876.7, 40960),
    ],
)
def test_released_models(
    config: dict[str, Any],
    kinds: tuple[int, ...],
    billions: float,
    active: float,
    state_mib: float,
    kv_bytes: int,
) -> None:
    """Oracles: the numbers of parameters in their cards and names, those of layers, and bytes by hand."""
    spec = read_model(config)
    attentions, mlps = [one.attention for one in spec.layers], [one.mlp for one in spec.layers]
    assert (
        sum(isinstance(one, Mamba2Spec) for one in attentions),
        sum(isinstance(one, AttentionSpec) for one in attentions),
        sum(isinstance(one, ExpertsSpec) for one in mlps),
        sum(isinstance(one, MlpSpec) for one in mlps),
    ) == kinds
    assert all(layer.has_one_block and len(list(layer.norms)) == 1 for layer in spec.layers) and not spec.ropes
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(billions, rel=0.01)
    assert local_parameters(spec, 1, active_only=True) / 1e9 == pytest.approx(active, rel=0.01)
    states = spec.kv_layout.states
    assert states is not None and states.slot_bytes / MIB == pytest.approx(state_mib, rel=0.001)
    assert spec.kv_layout.block_bytes(1, 2, has_scales=False) == kv_bytes


def test_both_ways_to_list_layers() -> None:
    """Oracle: the pattern; releases since Ultra and transformers write lists, with two sets of names."""
    names = {"M": ("mamba", "linear_attention"), "*": ("attention", "full_attention"), "E": ("moe", "moe")}
    rest = {key: value for key, value in NANO.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    for which in (0, 1):
        listed = [names[letter][which] for letter in NANO["hybrid_override_pattern"]]
        limit = [0.0, ({"__float__": "Infinity"}, 1e308)[which]]
        assert read_model({**rest, "layers_block_type": listed, "time_step_limit": limit}) == read_model(NANO)


def test_legal_numbers_of_ranks() -> None:
    """By hand: 8 groups, each of which is normalised on one rank, and 2 KV heads, which are repeated."""
    for size in (1, 2, 4, 8):
        check_tensor_parallel(read_model(NANO), size)
    with pytest.raises(ConfigError, match=r"16; the 8 Mamba2 groups, each .* are fewer than the ranks.*: 1, 2, 4, 8$"):
        check_tensor_parallel(read_model(NANO), 16)
    check_tensor_parallel(read_model({**NANO, "n_groups": 1}), 16)
    with pytest.raises(ConfigError, match=r"64 Mamba2 heads cannot be divided equally"):
        check_tensor_parallel(read_model({**NANO, "num_attention_heads": 36, "num_key_value_heads": 3}), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'; it must say of each layer"),
        ({"hybrid_override_pattern": None}, "there must be one of them"),
        ({"layer_types": ["mamba"] * 52}, "they must agree"),
        ({"num_hidden_layers": 51}, "num_hidden_layers is 51, and 52 layers are named"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]; steps are not bounded here"),
        ({"time_step_limit": [0.0]}, "steps are not bounded here"),
        ({"n_groups": 7}, "mamba_num_heads is 64; it must be a multiple of n_groups, 7"),
        ({"conv_kernel": 1}, "conv_kernel is 1; it must be at least 2"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; this engine supports relu2"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06; this engine supports only 1e-05"),
        ({"residual_in_fp32": True}, "residual_in_fp32 is True"),
        ({"unknown_key": 1}, "unknown_key"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    """Oracle: the error names the key and its value, or the rule."""
    with pytest.raises(ConfigError, match=message):
        read_model(json.loads(json.dumps({**NANO, **change})))


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_bytes_of_weights(world_size: int) -> None:
    """Oracle: the parameters that the layers make, one group on several ranks too."""
    for spec in (read_model(SMALL), read_model({**SMALL, "n_groups": 1})):
        found = parameters(spec, world_size)
        assert local_parameters(spec, world_size) == sum(one.numel() for one in found.values())
        expected = sum(one.nbytes for one in found.values())
        assert local_weight_bytes(spec, world_size, dtype="bfloat16") == expected


def test_rows_of_the_projection() -> None:
    """By hand: on rank 1 of 2 heads 8 to 15 of 4 elements and groups 4 to 7 of 16, in the order C, B, x, z, dt."""
    found = sources(read_model(SMALL), 1, 2)
    parts = found["layers.0.mixer.in_proj.weight"]
    assert {part.name for part in parts} == {"model.layers.0.mixer.in_proj.weight"}
    x, z, b, c, dt = Span(64 + 32, 32), Span(32, 32), Span(128 + 64, 64), Span(256 + 64, 64), Span(384 + 8, 8)
    assert [part.taken[0] for part in parts] == [c, b, x, z, dt]
    channels = [Span(span.start - 64, span.size) for span in (c, b, x)]
    for name in ("conv", "conv_bias"):
        assert [part.taken[0] for part in found[f"layers.0.mixer.{name}"]] == channels
    assert all(part.shape[0] == 320 for part in found["layers.0.mixer.conv"])
    up = found["layers.1.mlp.gate_up_proj.weight"]
    assert [(part.name, part.taken[0]) for part in up] == [("model.layers.1.mixer.up_proj.weight", Span(48, 48))]


def test_constants_are_float32() -> None:
    """By hand: all but the norm of groups."""
    found = parameters(read_model(SMALL), 1)
    wide = {name.rpartition(".")[2] for name, one in found.items() if one.dtype is torch.float32 and ".0." in name}
    assert wide == {"conv", "conv_bias", "log_decay", "dt_bias", "skip"}


def test_granite() -> None:
    """Oracles: the numbers in the model's card, 32 billion parameters of which 9 are active; multipliers as given."""
    spec = read_model(GRANITE)
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(32.2, rel=0.01)
    assert local_parameters(spec, 1, active_only=True) / 1e9 == pytest.approx(8.8, rel=0.01)
    assert sum(isinstance(layer.attention, Mamba2Spec) for layer in spec.layers) == 36 and not spec.ropes
    assert not any(layer.has_one_block for layer in spec.layers) and spec.layers[0].residual_scale == 0.22
    assert (spec.embedding_scale, spec.logit_scale, spec.attentions[0].scale) == (12.0, 1 / 16, 0.0078125)
    for size in (1, 2, 4, 8, 16, 32):  # a single group is on all ranks
        check_tensor_parallel(spec, size)
    dense = read_model({**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_d_head": "auto"})
    assert dense.layers[0].experts is None and len(dense.ropes) == 1 and dense.attentions[0].rope == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_d_head": 32}, "mamba_n_heads is 128 and mamba_d_head is 32; their product must be"),
        ({"mamba_n_groups": 3}, "mamba_n_heads is 128; it must be a multiple of mamba_n_groups, 3"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; it must be nope or rope"),
        ({"layer_types": ["mamba"] * 39}, "layer_types is .* for each of the 40 layers"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True"),
    ],
)
def test_refusals_of_granite(change: dict[str, Any], message: str) -> None:
    """Oracle: the error names the key and its value, or the rule."""
    with pytest.raises(ConfigError, match=message):
        read_model({**GRANITE, **change})


def test_a_recommendation_says_what_states_take() -> None:
    """Oracle: by hand.  A row's states are those of 23 layers, 64 heads x 128 x 64 and 3 inputs of 6,144 channels,
    float32; a token's K/V 6 layers of 2 KV heads x 128 in 2 bytes.  A model without states has no such line."""
    found, num_bytes = recommend(read_model(NANO), workload="chat", gpu="h200"), 23 * 4 * (64 * 128 * 64 + 3 * 6144)
    rows = found.max_num_seqs
    assert found.state_bytes == (rows + rows // 2 + 1) * num_bytes and found.bytes_per_token == 6144
    line = (
        f"47.6 MiB each, as much as the K/V of 8,127 tokens; {rows:,} for running requests, {rows // 2:,} for prefixes"
    )
    assert line in str(found) and round(num_bytes / 6144) == 8127 and round(num_bytes / MIB, 1) == 47.6
    assert "recurrent" not in str(recommend(read_model(SEVEN_B), workload="chat", gpu="h200"))
