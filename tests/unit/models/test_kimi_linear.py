"""Kimi Linear: its description, its memory, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.errors import ConfigError
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.recurrent import KimiDeltaSpec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.weight_sizes import local_parameters

FULL = [4, 8, 12, 16, 20, 24, 27]
DELTA = [number for number in range(1, 28) if number not in FULL]
# As releases have it.
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": DELTA,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_what_follows_from_a_description() -> None:
    """Oracle: the released model's card: 48 B parameters, 3 B for a token, three layers of four with a state; the bytes
    by hand: rows of 576 in 7 layers, and of each other layer 3 inputs of 12,288 channels and 32 matrices."""
    spec = read_model(KIMI)
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(49.1, rel=0.01)
    assert local_parameters(spec, 1, active_only=True) / 1e9 == pytest.approx(3.5, rel=0.01)
    assert [index + 1 for index, one in enumerate(spec.layers) if isinstance(one.attention, AttentionSpec)] == FULL
    assert all(one.rope is None and one.scale == 192**-0.5 for one in spec.attentions) and not spec.ropes
    delta = spec.layers[0].attention
    assert delta == KimiDeltaSpec(num_heads=32, head_dim=128, taps=4, eps=1e-5)
    assert spec.layers[0].experts is None and spec.layers[1].experts is not None
    assert spec.kv_layout.block_bytes(16, 2) == 7 * 16 * 576 * 2 and spec.max_position == 1048576
    states = spec.kv_layout.states
    assert states is not None and states.slot_bytes == 20 * 4 * (3 * 12288 + 32 * 128 * 128)
    for size in (1, 2, 4, 8):
        check_tensor_parallel(spec, size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"num_expert_group": "4"}, "num_expert_group is '4'; it must be of type int"),
        ({"linear_attn_config": {**KIMI["linear_attn_config"], "kda_layers": DELTA[1:]}}, "be 1 to 27, each once"),
        ({"linear_attn_config": {**KIMI["linear_attn_config"], "gate_lower_bound": -5.0}}, "gate_lower_bound"),
        ({"linear_attn_config": {**KIMI["linear_attn_config"], "short_conv_kernel_size": 1}}, "at least 2"),
        ({"layer_types": ["linear_attention"] * 27}, "it must name linear_attention or full_attention"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    """Oracle: the error names the key and its value, or the rule."""
    with pytest.raises(ConfigError, match=message):
        read_model({**KIMI, **changes})
