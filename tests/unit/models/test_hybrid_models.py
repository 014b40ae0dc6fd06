"""Models with a recurrent state in most layers: their description, their memory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tp_engine
from tests.unit.model_config.test_model_config import llama
from tests.unit.models.test_shard import sources
from tests.unit.models.test_weight_sizes import parameters
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.mlp import ExpertsSpec
from tp_engine.model_config.recurrent import GatedDeltaNetSpec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.weight_sizes import local_parameters, local_weight_bytes
from tp_engine.system.units import MIB
from tp_engine.weights.source import Span
from tp_engine.worker.effective_config import resolve

# Of Qwen3.5-35B-A3B's text part, with the keys of its wrapper.
QWEN35_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "vision_config": {"depth": 27},
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "eos_token_id": 248044,
        "dtype": "bfloat16",
    },
}
# Of Qwen3.8-27B and its text part, but for ``layer_types``, which the interval implies.
QWEN38_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "language_model_only": False,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        **{key: value for key, value in QWEN35_35B["text_config"].items() if "expert" not in key and "moe" not in key},
        "model_type": "qwen3_5_text",
        "attention_dropout": 0.0,
        "bos_token_id": 248044,
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": None,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "use_cache": True,
    },
}
NEXT = llama(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    norm_topk_prob=True,
    partial_rotary_factor=0.25,
    mlp_only_layers=[],
    decoder_sparse_step=1,
)


def changed(**changes: Any) -> dict[str, Any]:
    return {**QWEN35_35B, "text_config": {**QWEN35_35B["text_config"], **changes}}


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    """``folder``, with a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_follows_from_a_description() -> None:
    """Oracle: the released model's configuration, and a state of 61 MiB, by hand (30 layers of 2 MiB and 96 KiB)."""
    spec = read_model(QWEN35_35B)
    delta, attention, experts = spec.layers[0].attention, spec.layers[3].attention, spec.layers[0].mlp
    assert isinstance(delta, GatedDeltaNetSpec) and (delta.num_key_heads, delta.num_value_heads) == (16, 32)
    assert isinstance(attention, AttentionSpec) and attention.gate is not None and attention.head_dim == 256
    assert isinstance(experts, ExpertsSpec) and experts.shared_gate and experts.rule.renormalises
    assert spec.ropes[0].rotary_dim == 64 and spec.final_norm is not None and spec.final_norm.offset == 1.0
    assert all(norm.offset == 1.0 for layer in spec.layers for norm in layer.norms)
    assert spec.kv_layout.layers == tuple(range(3, 40, 4)) and len(spec.attentions) == 10
    states = spec.kv_layout.states
    assert states is not None and states.slot_bytes == 30 * (2 * MIB + 8192 * 3 * 4)
    on_8 = spec.kv_layout_on(8).states
    assert on_8 is not None and on_8.slot_bytes * 8 == states.slot_bytes


def test_later_releases_have_more_keys() -> None:
    """Oracle: the released model's configuration: 48 of 64 layers with 48 value heads; its size in its name."""
    spec = read_model(QWEN38_27B)
    deltas = [layer.attention for layer in spec.layers if isinstance(layer.attention, GatedDeltaNetSpec)]
    assert len(deltas) == 48 and deltas[0].num_value_heads == 48 and spec.ropes[0].rotary_dim == 64
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(27, rel=0.02)
    assert read_model({**QWEN38_27B, "language_model_only": True}) == spec
    sigmoid = {**QWEN38_27B["text_config"], "output_gate_type": "sigmoid"}
    with pytest.raises(ConfigError, match="output_gate_type is 'sigmoid'; it must be swish or silu"):
        read_model({**QWEN38_27B, "text_config": sigmoid})


def test_layers_by_interval() -> None:
    """Oracle: transformers' configuration, which derives ``layer_types`` from the interval."""
    spec = read_model({key: value for key, value in NEXT.items() if key != "layer_types"})
    assert [isinstance(layer.attention, AttentionSpec) for layer in spec.layers] == [False, False, False, True]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(attn_output_gate=False), "attn_output_gate is False"),
        (changed(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype is 'bfloat16'"),
        (changed(linear_num_value_heads=24), "linear_num_value_heads is 24; it must be a multiple"),
        (changed(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1; it must be at least 2"),
        (changed(layer_types=["linear_attention"] * 40), "full_attention for at least one"),
        (changed(layer_types=["sliding_attention"] * 40), "it must name linear_attention or full_attention"),
        (changed(unknown_key=1), "unknown_key"),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    """Oracle: the error names the key and its value, or the rule."""
    with pytest.raises(ConfigError, match=message):
        read_model(config)


def test_legal_numbers_of_ranks() -> None:
    """By hand: 8 value heads and 2 key heads, which are repeated on 4 and 8 ranks."""
    for size in (1, 2, 4, 8):
        check_tensor_parallel(read_model(NEXT), size)
    with pytest.raises(ConfigError, match=r"8 linear-attention value heads cannot be divided equally.*: 1, 2, 4, 8"):
        check_tensor_parallel(read_model(NEXT), 3)
    with pytest.raises(ConfigError, match="4 linear-attention key heads can be neither divided"):
        config = {**NEXT, "linear_num_key_heads": 4, "linear_num_value_heads": 12, "num_attention_heads": 6}
        config |= {"shared_expert_intermediate_size": 96}
        check_tensor_parallel(read_model({**config, "num_key_value_heads": 3}), 3)


@pytest.mark.parametrize("config", [NEXT, changed(num_hidden_layers=4, layer_types=None, num_experts=8)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_of_weights(config: dict[str, Any], world_size: int) -> None:
    """Oracle: the parameters that the layers make."""
    spec = read_model(config)
    found = parameters(spec, world_size)
    assert local_parameters(spec, world_size) == sum(one.numel() for one in found.values())
    expected = sum(one.nbytes for one in found.values())
    assert local_weight_bytes(spec, world_size, dtype="bfloat16") == expected


def test_rows_of_fused_projections() -> None:
    """By hand: on rank 1 of 2 the second key head (q 16, k 16, v 4 x 32, z 4 x 32) and its four value heads; on rank 3
    of 4 the same key head, whose last two value heads it takes."""
    spec = read_model(NEXT)
    stored = 2 * (16 + 16 + 4 * 32 + 4 * 32)
    for rank, world_size, first, count in ((1, 2, 0, 128), (3, 4, 64, 64)):
        parts = sources(spec, rank, world_size)["layers.0.mixer.in_proj.weight"]
        assert {part.name for part in parts} == {"model.layers.0.linear_attn.in_proj_qkvz.weight"}
        assert all(part.taken[0] == Span(stored // 2, stored // 2) for part in parts)
        rows = torch.arange(stored // 2).unsqueeze(1)
        decoded = [part.decode(rows).flatten().tolist() for part in parts]
        assert decoded[0] == list(range(16)) and decoded[1] == list(range(16, 32))
        assert decoded[2] == list(range(32 + first, 32 + first + count))
        assert decoded[3] == list(range(160 + first, 160 + first + count))


def test_half_a_product_can_not_be_quantised() -> None:
    """Oracle: the rule of all products; the error names both modules."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for kept, other in (("in_proj_z", "in_proj_qkv"), ("in_proj_a", "in_proj_b")):
        skipped = [f"model.language_model.layers.{index}.linear_attn.{kept}" for index in range(64)]
        config = {**QWEN38_27B, "quantization_config": {**fp8, "modules_to_not_convert": skipped}}
        with pytest.raises(ConfigError, match=rf"linear_attn\.{other} as e4m3 .*\.{kept} unquantised"):
            sources(read_model(config), 0, 1)


def test_gates_of_heads() -> None:
    """By hand: on rank 1 of 2 heads 4 to 7 of 64 rows and as many of their gates, which come last."""
    parts = sources(read_model(NEXT), 1, 2)["layers.3.self_attn.qkv_proj.weight"]
    names = [part.name.removeprefix("model.layers.3.self_attn.") for part in parts]
    assert names == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.weight"]
    rows = torch.arange(512, 1024).unsqueeze(1)
    query, gate = (parts[index].decode(rows).flatten() for index in (0, 3))
    assert parts[0].taken[0] == parts[3].taken[0] == Span(512, 512)
    assert query.tolist() == [512 + head * 128 + i for head in range(4) for i in range(64)]
    assert torch.equal(gate, query + 64)


def test_advice_counts_states(tmp_path: Path) -> None:
    """Oracle: a state for each of ``max_num_seqs`` rows, half as many snapshots, and no byte more than there are."""
    found = tp_engine.recommend(
        str(folder_of(tmp_path, QWEN35_35B)), workload="chat", gpu="h200", tensor_parallel_size=2
    )
    states = read_model(QWEN35_35B).kv_layout_on(2).states
    assert (
        states is not None
        and found.fits
        and found.state_bytes == (found.max_num_seqs * 3 // 2 + 1) * states.slot_bytes > 0
    )
    parts = found.weight_bytes + found.activation_bytes + found.overhead_bytes + found.state_bytes
    assert parts + found.kv_cache_bytes == found.requested_bytes
    assert "recurrent states" in found.explain()


def test_a_host_tier_is_refused(tmp_path: Path) -> None:
    """Oracle: the value, the rule, the remedy."""
    config = EngineConfig(model=str(folder_of(tmp_path, NEXT)), device="cpu", kv_offloading_size=1.0)
    with pytest.raises(
        ConfigError, match=r"kv_offloading_size is 1 GiB.*recurrent states.*set kv_offloading_size to 0"
    ):
        resolve(config)


def test_snapshots(tmp_path: Path) -> None:
    """By hand: half of the rows, at least 8; as asked; none without a prefix cache, or for a model without states."""
    hybrid = str(folder_of(tmp_path, NEXT))
    for options, expected in (
        ({}, 128),
        ({"max_num_seqs": 4}, 8),
        ({"num_state_snapshots": 3}, 3),
        ({"enable_prefix_caching": False}, 0),
    ):
        assert resolve(EngineConfig(model=hybrid, device="cpu", **options)).num_snapshots == expected
    (tmp_path / "other").mkdir()
    other = str(folder_of(tmp_path / "other", llama()))
    assert resolve(EngineConfig(model=other, device="cpu")).num_snapshots == 0
    with pytest.raises(ConfigError, match="num_state_snapshots is 2, but no layer of this LlamaForCausalLM"):
        resolve(EngineConfig(model=other, device="cpu", num_state_snapshots=2))
    with pytest.raises(ConfigError, match="num_state_snapshots is -1; it must be at least 0"):
        EngineConfig(model=other, num_state_snapshots=-1)
