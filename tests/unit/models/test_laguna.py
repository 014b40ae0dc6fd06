"""Laguna: its description, its memory, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.errors import ConfigError
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.head_gate import HeadGateSpec
from tp_engine.model_config.mlp import ExpertsSpec
from tp_engine.models.weight_sizes import local_parameters

_F, _S = "full_attention", "sliding_attention"
# Of Laguna XS.2, as releases have it.
XS: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "eos_token_id": [2, 24],
    "gating": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "layer_types": [_F, _S, _S, _S] * 10,
    "max_position_embeddings": 131072,
    "mlp_layer_types": ["dense"] + ["sparse"] * 39,
    "model_type": "laguna",
    "moe_apply_router_weight_on_input": False,
    "moe_intermediate_size": 512,
    "moe_routed_scaling_factor": 2.5,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 9,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "original_max_position_embeddings": 4096,
        _F: {
            "attention_factor": 1.0,
            "beta_fast": 64.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "rope_theta": 500000.0,
            "rope_type": "yarn",
        },
        _S: {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 512,
    "sliding_window": 512,
    "swa_attention_sink_enabled": False,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
# What Laguna M has in other ways: no windows, a gate for each element, and heads that turn as a whole.
M: dict[str, Any] = {
    **{key: value for key, value in XS.items() if key not in ("layer_types", "num_attention_heads_per_layer")},
    "decoder_sparse_step": 1,
    "gating": "per-element",
    "mlp_only_layers": [0, 1, 2],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 37,
    "norm_topk_prob": True,
    "rope_parameters": {_F: {**XS["rope_parameters"][_F], "partial_rotary_factor": 1.0}},
    "sliding_window": 0,
}


def test_what_follows_from_a_description() -> None:
    """Oracle: the released model's card: 33 B parameters, 3 B for a token, 30 of 40 layers with a window of 512; KV
    bytes by hand: 8 heads of 128 keys and values, in blocks of 10 layers."""
    spec = read_model(XS)
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(33.4, rel=0.01)
    assert local_parameters(spec, 1, active_only=True) / 1e9 == pytest.approx(3.0, rel=0.1)
    full, windowed = spec.attentions[:2]
    assert (full.num_heads, full.window, full.rope) == (48, None, 0)
    assert (windowed.num_heads, windowed.window, windowed.rope) == (64, 512, 1)
    assert full.gate == HeadGateSpec(name="g_proj", function="softplus", is_per_head=True) and full.gate_dim == 1
    assert [rope.rotary_dim for rope in spec.ropes] == [64, 128] and spec.max_position == 131072
    experts = spec.layers[1].mlp
    assert isinstance(experts, ExpertsSpec) and experts.rule.factor == 2.5 and experts.router_cap is None
    assert spec.layers[0].experts is None and spec.eos_token_ids == (2, 24)
    layout = spec.kv_layout
    assert layout.windows == (None, 512, 512, 512) and layout.block_bytes(16, 2) == 10 * 16 * 2 * 8 * 128 * 2
    for size in (1, 2, 4, 8):
        check_tensor_parallel(spec, size)


def test_gates_of_elements_and_no_windows() -> None:
    """Oracle: transformers' module: a gate as wide as the queries, and windows only where layer_types has them."""
    spec = read_model(M)
    assert spec.kv_layout.keeps_all and spec.attentions[0].gate_dim == 128
    assert [layer.experts is None for layer in spec.layers[:4]] == [True, True, True, False]
    assert spec.ropes[0].rotary_dim == 128
    capped = read_model({**M, "moe_router_logit_softcapping": 30.0}).layers[3].experts
    assert capped is not None and capped.router_cap == 30.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gating": "per-token"}, "gating is 'per-token'; it must be true, per-head or per-element"),
        ({"gating": False}, "gating is False"),
        ({"gating_types": ["per_element"] * 40}, "gating_types"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is True"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is True"),
        ({"num_attention_heads_per_layer": [48]}, "a number of heads for each of the 40 layers"),
        ({"num_attention_heads_per_layer": [48, "64", 64, 64] * 10}, "a number of heads for each"),
        ({"num_attention_heads_per_layer": [48, 60, 64, 64] * 10}, "multiple of num_key_value_heads, 8"),
        ({"gating_types": ["per_head"]}, "gating_types"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        ({"sliding_window": 0}, "no sliding window is enabled"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping is -1"),
        ({"rope_parameters": {**XS["rope_parameters"], "other": {"rope_theta": 1.0}}}, "other="),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    """Oracle: the error names the key and its value, or the rule."""
    with pytest.raises(ConfigError, match=message):
        read_model({**XS, **changes})
