"""LFM2 and LFM2.5: their description, their memory, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models.test_shard import sources
from tests.unit.models.test_weight_sizes import parameters
from tp_engine.errors import ConfigError
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.recurrent import ShortConvSpec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.weight_sizes import local_parameters, local_weight_bytes

_C, _A = "conv", "full_attention"
# Of LFM2.5-1.2B, as releases have it.
LFM25_1B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
# Of LFM2-8B-A1B.
LFM2_8B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": [_C, _C, _A, _C, _C, _C, _A, _C, _C, _C, _A, _C, _C, _C, _A, _C, _C, _C, _A, _C, _C, _A, _C, _C],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def test_what_follows_from_a_description() -> None:
    """Oracle: the released models' cards: 1.17 B parameters; 8.3 B, of which 1.5 B for a token; the state by hand: two
    inputs of each channel in float32."""
    dense, sparse = read_model(LFM25_1B), read_model(LFM2_8B)
    conv, mlp = dense.layers[0].attention, dense.layers[0].mlp
    assert isinstance(conv, ShortConvSpec) and (conv.num_channels, conv.taps) == (2048, 3)
    assert isinstance(mlp, MlpSpec) and mlp.inner_size == 8192
    assert [isinstance(layer.attention, AttentionSpec) for layer in dense.layers].count(True) == 6
    assert dense.is_tied and dense.eos_token_ids == (7,) and dense.ropes[0].theta == 1e6
    assert local_parameters(dense, 1) / 1e9 == pytest.approx(1.17, rel=0.01)
    states, on_4 = dense.kv_layout.states, dense.kv_layout_on(4).states
    assert states is not None and states.slot_bytes == 10 * 2 * 2048 * 4
    assert on_4 is not None and on_4.slot_bytes * 4 == states.slot_bytes
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in sparse.layers] == [False] * 2 + [True] * 22
    assert local_parameters(sparse, 1) / 1e9 == pytest.approx(8.34, rel=0.01)
    assert local_parameters(sparse, 1, active_only=True) / 1e9 == pytest.approx(1.5, rel=0.05)


def test_the_text_part_of_a_model_with_images() -> None:
    """Oracle: the text part alone, but for names; keys of images, as releases have them, are of the whole."""
    keys: dict[str, Any] = {
        "do_image_splitting": True,
        "downsample_factor": 2,
        "encoder_patch_size": 16,
        "image_token_id": 396,
    }
    keys |= {"max_image_tokens": 256, "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64}
    keys |= {"min_tiles": 2, "projector_bias": True, "projector_hidden_act": "gelu", "tile_size": 512}
    keys |= {"use_image_special_tokens": True, "use_thumbnail": True, "projector_use_layernorm": False}
    whole = {**keys, "architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl"}
    whole |= {"vision_config": {"hidden_size": 768}, "text_config": {**LFM25_1B, "tie_embedding": False}}
    found, alone = read_model(whole), read_model(LFM25_1B)
    assert found.layers == alone.layers and found.is_tied and found.eos_token_ids == (7,)
    name = "model.layers.2.self_attn.o_proj.weight"
    assert "model.language_model.layers.2.self_attn.out_proj.weight" in found.names.spell(name)
    with pytest.raises(ConfigError, match="model_type is 'lfm3'; it must be lfm2"):
        read_model({**whole, "text_config": {**LFM25_1B, "model_type": "lfm3"}})
    with pytest.raises(ConfigError, match="unknown_key"):
        read_model({**whole, "unknown_key": 1})


def test_sizes_of_the_inner_layer() -> None:
    """Oracle: transformers' MLP: two thirds, a factor, up to a multiple; or as it is; older keys have precedence."""
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    for changes in (
        dict[str, Any](),
        {"block_ff_dim": None, "intermediate_size": 6656},
        {"block_ff_dim": 1000, "intermediate_size": 6656, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 64},
        {"block_auto_adjust_ff_dim": False, "block_ff_dim": 10752},
    ):
        config = {key: value for key, value in {**LFM25_1B, **changes}.items() if value is not None}
        mlp = (
            read_model({**config, "hidden_size": 64, "block_dim": 64, "conv_dim": 64, "conv_dim_out": 64}).layers[0].mlp
        )
        assert isinstance(mlp, MlpSpec)
        assert mlp.inner_size == Lfm2MLP(Lfm2Config(**{**config, "hidden_size": 64})).w1.out_features


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LFM25_1B, {"conv_bias": True}, "conv_bias is True"),
        (LFM25_1B, {"conv_dim": 1024}, "conv_dim is 1024; this engine supports only 2048"),
        (LFM25_1B, {"block_use_swiglu": False}, "block_use_swiglu is False"),
        (LFM25_1B, {"conv_L_cache": 1}, "conv_L_cache is 1; it must be at least 2"),
        (LFM25_1B, {"full_attn_idxs": []}, "full_attention for at least one"),
        (LFM2_8B, {"layer_types": ["sliding_attention"] * 24}, "it must name conv or full_attention for each"),
        (LFM2_8B, {"num_shared_experts": 1}, "num_shared_experts"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """Oracle: the error names the key and its value, or the rule."""
    with pytest.raises(ConfigError, match=message):
        read_model({**config, **changes})


def test_legal_numbers_of_ranks() -> None:
    """By hand: 32 heads, 8 KV heads, 8192 inner elements and 2048 channels."""
    for size in (1, 2, 4, 8, 16):
        check_tensor_parallel(read_model(LFM25_1B), size)
    with pytest.raises(ConfigError, match="the 2048 channels of short convolutions cannot be divided equally"):
        check_tensor_parallel(read_model(LFM25_1B), 3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("config", [LFM25_1B, LFM2_8B])
def test_bytes_and_names_of_weights(config: dict[str, Any], world_size: int) -> None:
    """Oracles: the parameters that the layers make; transformers' names."""
    tiny: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "num_attention_heads": 8, "num_hidden_layers": 3}
    tiny |= {key: 64 for key in ("block_dim", "conv_dim", "conv_dim_out") if key in config}
    tiny |= {"layer_types": [_C, _A, _C]} if "layer_types" in config else {"full_attn_idxs": [1]}
    spec = read_model({**config, **tiny})
    found = parameters(spec, world_size)
    assert local_parameters(spec, world_size) == sum(one.numel() for one in found.values())
    expected = sum(one.nbytes for one in found.values())
    assert local_weight_bytes(spec, world_size, dtype="bfloat16") == expected
    names = {part.name for parts in sources(spec, 0, world_size).values() for part in parts}
    stored = {spec.names.spelled(name, spec.names.spellings[0]).removesuffix(".weight") for name in names}
    assert {f"model.layers.0.conv.{name}" for name in ("in_proj", "conv", "out_proj")} < stored
    assert {f"model.layers.0.feed_forward.{name}" for name in ("w1", "w2", "w3")} < stored
    assert {f"model.layers.1.self_attn.{name}" for name in ("out_proj", "q_layernorm", "k_layernorm")} < stored
    assert {"model.layers.1.operator_norm", "model.layers.1.ffn_norm", "model.embedding_norm"} < stored
