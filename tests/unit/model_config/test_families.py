"""The families' readers: published configurations, and every tensor of models of those sizes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import FAMILIES
from tests.unit.models.test_shard import sources
from tp_engine.errors import ConfigError
from tp_engine.layers.rotary import inverse_frequencies
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.families import families
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

# As the publishers wrote them, with fewer layers, and without dates and names of files.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Phi-3.5-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "auto_map": {"AutoConfig": "x.Phi3Config"},
        "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 32,
        "num_hidden_layers": 2, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "attention_dropout": 0.0, "vocab_size": 32064,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0, "eos_token_id": 199999,
        "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "interpolate_factor": 1,
        "intermediate_size": 8192, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "vocab_size": 200064,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "vocab_size": 256000,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 6, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "gemma-4-31B": {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "boi_token_id": 255999,
        "eoa_token_index": 258883, "image_token_id": 258880, "initializer_range": 0.02, "model_type": "gemma4",
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "enable_moe_block": False,
            "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
            "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": None,
            "num_attention_heads": 32, "num_experts": None, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
            "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024, "top_k_experts": None, "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        },
        "dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280, "tie_word_embeddings": True, "video_token_id": 258884,
    },
    "gemma-4-26B-A4B-text": {
        "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": True, "enable_moe_block": True,
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112, "max_position_embeddings": 262144, "model_type": "gemma4_text",
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "sliding_window": 1024, "top_k_experts": 8,
        "per_layer_config": {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 2} for layer in range(5, 30, 6)},
        "dtype": "bfloat16", "vocab_size": 262144,
    },
    "OLMo-2": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 100352,
    },
    "Olmo-3": {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_attention_heads": 32,
        "num_hidden_layers": 4, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "rope_scaling": {
            "attention_factor": 1.2079, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "granite-3.3": {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12800, "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49159,
    },
    "GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
        "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 151552,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "eos_token_id": 128012, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 4,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "num_attention_heads": 16,
        "num_hidden_layers": 4, "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "vocab_size": 128256,
    },
    "Seed-OSS-36B": {
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
        "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
        "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 155136,
    },
    "EXAONE-4.0-32B": {
        "architectures": ["Exaone4ForCausalLM"], "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27392,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "max_position_embeddings": 131072,
        "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 4, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 102400,
    },
    "Muse-Glimmer-30B": {
        "architectures": ["MuseGlimmerForConditionalGeneration"], "image_token_id": 200092, "dtype": "bfloat16",
        "model_type": "muse_glimmer", "out_hidden_size": 6144, "projector_hidden_act": "gelu",
        "projector_hidden_size": 4096, "video_token_id": 200091, "vision_config": {"model_type": "muse_glimmer_vision"},
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 200001, "final_logit_softcapping": 20.0,
            "head_dim": 128, "hidden_activation": "silu", "hidden_size": 6656, "intermediate_size": 19968,
            "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0], "max_position_embeddings": 131072,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "model_type": "muse_glimmer_text",
            "num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
            "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-08, "qk_scale_factor": 3.87,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "sliding_window": 2048,
            "vocab_size": 202048,
        },
    },
    "Command-R7B": {
        "_sliding_window_pattern": 4, "architectures": ["Cohere2ForCausalLM"], "attention_bias": False,
        "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
        "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096, "model_type": "cohere2",
        "num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 8,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
        "vocab_size": 256000,
    },
    "Ministral-3-8B": {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "vision_feature_layer": -1, "vision_config": {"model_type": "pixtral"},
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
            "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                "rope_type": "yarn", "type": "yarn",
            },
            "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
        },
    },
    "Mistral-Small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "vision_config": {"model_type": "pixtral"}, "torch_dtype": "bfloat16",
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
        },
    },
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
        "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
        "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 2, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "video_token_id": 151656, "vision_config": {"depth": 32},
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
        "vocab_size": 152064,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_accepted(name: str) -> None:
    """Oracle: keys and values as the publishers wrote them; these models run."""
    spec = read_model(PUBLISHED[name])
    assert spec.dtype in ("bfloat16", "float32") and spec.max_position >= 4096
    check_tensor_parallel(spec, 1)


def test_what_follows_from_a_description() -> None:
    """Oracle: the released models' papers and transformers' modules: Gemma 3, Granite, Phi-4-mini, OLMo 3."""
    gemma = read_model(PUBLISHED["gemma-3-4b"])
    assert [attention.window for attention in gemma.attentions] == [1024] * 5 + [None]
    assert [attention.rope for attention in gemma.attentions] == [1] * 5 + [0]
    full, local = gemma.ropes
    assert (full.kind, full.factor, full.theta) == ("linear", 8.0, 1e6) and (local.kind, local.theta) == (
        "default",
        1e4,
    )
    assert gemma.tie_word_embeddings and gemma.embedding_scale == 2560**0.5 and gemma.vocab_size == 262208
    mlp = gemma.layers[0].mlp
    assert mlp is not None and mlp.activation.kind == "gelu_tanh" and gemma.attentions[0].head_dim == 256
    assert len(gemma.kv_layout.groups) == 6
    granite = read_model(PUBLISHED["granite-3.3"])
    assert (granite.embedding_scale, granite.logit_scale, granite.layers[0].residual_scale) == (12.0, 1 / 16, 0.22)
    assert read_model(PUBLISHED["Phi-4-mini"]).ropes[0].rotary_dim == 96
    olmo = read_model(PUBLISHED["Olmo-3"])
    assert [rope.kind for rope in olmo.ropes] == ["yarn", "default"] and olmo.ropes[0].attention_factor == 1.2079
    assert olmo.layers[0].input_norm is None and olmo.layers[0].attention_out_norm is not None


def test_gemma_4() -> None:
    """Oracle: transformers' modules, and the layout by hand: full layers are half as wide on 1 rank (31B: 2,048
    numbers per token to 4,096), and as wide on 8; blocks of 10 full layers hold 5 and 10 windowed ones."""
    dense, mixed = (read_model(PUBLISHED[name]) for name in ("gemma-4-31B", "gemma-4-26B-A4B-text"))
    for spec, window, full in ((dense, (16, 256), (4, 512)), (mixed, (8, 256), (2, 512))):
        attentions = spec.attentions[4:6]
        assert [(one.num_kv_heads, one.head_dim) for one in attentions] == [window, full]
        assert [one.values_from_keys for one in attentions] == [False, True]
        assert all(one.scale == 1.0 and one.qk_norm == QkNormSpec(eps=1e-6, includes_values=True) for one in attentions)
        assert [rope.num_pairs for rope in spec.ropes] == [64, 128] and spec.logit_softcap == 30.0
    assert dense.layers[0].beside is None and dense.layers[0].experts is None
    experts = mixed.layers[0].experts
    assert experts is not None and (experts.num_experts, experts.inner_size, experts.rule.top_k) == (128, 704, 8)
    layouts = [dense.kv_layout_on(size) for size in (1, 8)]
    assert [len(one.groups) for one in layouts] == [11, 6]
    assert [one.block_bytes(16, 2) for one in layouts] == [2 * 16 * 2 * 20_480, 2 * 16 * 2 * 5_120]
    assert [len(mixed.kv_layout_on(size).groups) for size in (1, 4)] == [10, 6]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma-4-26B-A4B-text", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ("gemma-4-26B-A4B-text", {"num_kv_shared_layers": 26}, "num_kv_shared_layers is 26.*layers of each kind"),
        ("gemma-4-26B-A4B-text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma-4-26B-A4B-text", {"per_layer_config": {"5": {"sliding_window": 4}}}, "sliding_window=4"),
        ("gemma-4-26B-A4B-text", {"per_layer_config": {"30": {"head_dim": 512}}}, "0 to 29: correct or remove '30'"),
        ("gemma-4-26B-A4B-text", {"per_layer_config": {"full": {"head_dim": 512}}}, "correct or remove 'full'"),
        (
            "Phi-3.5-mini",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "48 pairs",
        ),
        ("Phi-3.5-mini", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-2-2b", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma-3-4b", {"audio_seq_length": 5, "router": 3}, "router=3"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": "LGLG"}, "LGLG"),
        ("Command-R7B", {"use_parallel_block": False}, "use_parallel_block"),
        ("Command-R7B", {"use_qk_norm": True}, "use_qk_norm"),
        ("SmolLM3-3B", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("OLMo-2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma-2-2b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
        ("gemma-2-2b", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        ("gemma-2-2b", {"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0"),
        ("gemma-3-1b", {"query_pre_attn_scalar": -256}, "query_pre_attn_scalar"),
        ("granite-3.3", {"logits_scaling": 0}, "logits_scaling is 0.0"),
        ("granite-3.3", {"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ("Phi-3.5-mini", {"original_max_position_embeddings": 1}, "at least 2"),
        ("granite-3.3", {"num_local_experts": 8}, "num_local_experts"),
        ("Muse-Glimmer-30B", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    """Oracle: the rule that the reader ignores no option of config.json."""
    with pytest.raises(ConfigError, match=named):
        read_model({**PUBLISHED[name], **changes})


@pytest.mark.parametrize(
    ("thetas", "turning"), [(None, [0, 0, 0, None]), ([0, 500000.0, 500000, 0], [None, 0, 0, None]), ([1e4] * 4, None)]
)
def test_which_layers_of_muse_glimmer_turn(thetas: list[float] | None, turning: list[int | None] | None) -> None:
    """Oracle: transformers' module, in which all layers that turn do so by ``rope_parameters``, whatever the theta."""
    whole = PUBLISHED["Muse-Glimmer-30B"]
    text = {name: value for name, value in whole["text_config"].items() if name != "layer_rope_theta"}
    text |= {} if thetas is None else {"layer_rope_theta": thetas}
    if turning is None:
        with pytest.raises(ConfigError, match=r"layer_rope_theta is \[10000.*rope_theta, 500000"):
            read_model({**whole, "text_config": text})
        return
    spec = read_model({**whole, "text_config": text})
    assert [one.rope for one in spec.attentions] == turning
    assert [one.window for one in spec.attentions] == [2048, 2048, 2048, None]
    assert spec.attentions[0].scale == 3.87 * 128**-0.5 and spec.embedding_eps == 1e-5


# transformers builds a vision part of its own default size beside the text part.
TEXT_ONLY = [name for name, config in PUBLISHED.items() if "vision_config" not in config]


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_every_tensor_of_a_real_size_is_known(name: str) -> None:
    """Oracle: names and shapes of transformers' own modules, built from the same configuration on the meta device.

    Every tensor is read, skipped by a prefix, or tied, and each parameter's sources are among them.
    """
    import transformers

    spec = read_model(PUBLISHED[name])
    family = next(one for one in FAMILIES.values() if one.model == spec.architecture)
    config = getattr(transformers, family.config).from_dict(dict(PUBLISHED[name]))
    with torch.device("meta"):
        model = getattr(transformers, family.model)(config)
    stored = {tensor: tuple(value.shape) for tensor, value in model.state_dict().items()}
    if spec.tie_word_embeddings:
        del stored["lm_head.weight"]
    known = {source.name: source.shape for found in sources(spec, 0, 1).values() for source in found}
    assert known == stored


def test_rules_of_a_quantised_gemma_4_name_experts_by_themselves() -> None:
    """Oracle: a group of llm-compressor that quantises experts alone, by the names of its own modules."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": [r"re:.*experts\.\d+\..*_proj"], "weights": weights, "format": "pack-quantized"}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    spec = read_model({**PUBLISHED["gemma-4-26B-A4B-text"], "quantization_config": method})
    read = {source.name for found in sources(spec, 0, 1).values() for source in found}
    packed = {name for name in read if name.endswith("_packed")}
    assert packed and all(".experts." in name for name in packed)
    assert "model.layers.0.mlp.down_proj.weight" in read


def test_refused_numbers_of_ranks_name_the_legal_ones() -> None:
    """Oracle: worked out by hand: 24 heads, 8 KV heads, an inner size of 8192."""
    with pytest.raises(
        ConfigError, match=r"is 3; the intermediate size of 8192 .*Legal sizes for this Phi3ForCausalLM: 1, 2, 4, 8$"
    ):
        check_tensor_parallel(read_model(PUBLISHED["Phi-4-mini"]), 3)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"factor": 8.0}),
        ("yarn", {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        ("yarn", {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
        ("longrope", {"short_factor": [1.0 + i / 8 for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}),
        ("proportional", {"partial_rotary_factor": 0.25}),
    ],
)
@pytest.mark.parametrize("max_model_len", [256, 2048])
def test_rotations_are_those_of_transformers(kind: str, numbers: dict[str, Any], max_model_len: int) -> None:
    """Oracle: transformers' own functions; for LongRoPE, the factors for a sequence of this length."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from tp_engine.model_config.config_json import ConfigJson
    from tp_engine.model_config.rope import RopeRules, parse_rope

    values = {"rope_type": kind, "rope_theta": 5e4, "original_max_position_embeddings": 512, **numbers}
    rules = RopeRules(partial=1.0 if kind == "proportional" else None)
    spec = parse_rope(ConfigJson(values), head_dim=32, max_position=2048, rules=rules)
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(values)
    )
    found = inverse_frequencies(spec, max_model_len)
    if kind == "default":
        expected, factor = 1.0 / (5e4 ** (torch.arange(0, 32, 2) / 32)), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert spec.attention_factor == pytest.approx(factor)


def test_the_readers_are_found() -> None:
    """Oracle: the files of the folder; a rotation can be described without torch, and can be a key."""
    assert len(families()) >= 21 and "SeedOssForCausalLM" in families()
    assert {RopeSpec(rotary_dim=8): 1}[RopeSpec(rotary_dim=8)] == 1


# What the tensors tell, by their shapes or by being there.
SEEN_IN_TENSORS = ("head_dim", "num_key_value_heads", "num_local_experts", "tie_word_embeddings")
# Keys that transformers' own defaults do not fit without.
NEEDED: dict[str, dict[str, Any]] = {
    "glm4-moe": {"head_dim": 128},
    "deepseek-v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 64},
    "mistral3-vision": {"text_config": {"model_type": "mistral"}},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys_mean_what_transformers_means(name: str) -> None:
    """Oracle: the configuration that transformers makes of no keys, written in full; a reader may refuse instead."""
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**NEEDED.get(name, {}))
    full = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [family.hub_name or family.model]}
    part = full.get("text_config", full)
    expected = model_of(full)
    assert expected is not None
    others = {"architectures", "model_type", *SEEN_IN_TENSORS}
    if name == "gemma4-unified":
        others.add("use_bidirectional_attention")  # of images, which the engine does not give to this model
    for key in part.keys() - others:
        value = part.pop(key)
        assert model_of(full) in (None, expected), key
        part[key] = value


@pytest.mark.parametrize("name", FAMILIES)
def test_null_is_no_number(name: str) -> None:
    """Oracle: transformers' class: the number or truth that it makes of null, and where it keeps None or refuses it,
    anything but its default; a reader may refuse instead."""
    import transformers

    family = FAMILIES[name]
    kind = getattr(transformers, family.config)
    full = json.loads(kind(**NEEDED.get(name, {})).to_json_string(use_diff=False))
    full["architectures"] = [family.hub_name or family.model]
    part = full.get("text_config", full)
    expected, num_seen = model_of(full), 0
    for key, value in list(part.items()):
        if type(value) not in (bool, int, float) or key in SEEN_IN_TENSORS:
            continue
        part[key] = not value if type(value) is bool else 2 * value
        if (other := model_of(full)) not in (None, expected):  # it matters
            part[key] = None
            try:
                kept = getattr(kind.from_dict(json.loads(json.dumps(full))).get_text_config(), key, None)
            except Exception:  # of whatever kind: it refuses null
                kept = None
            found = model_of(full)
            if kept is not None:
                part[key] = kept
                assert found in (None, model_of(full)), key
            elif type(value) is bool:
                assert found in (None, other if value else expected), key
            elif value:
                assert found != expected, key
            num_seen += 1
        part[key] = value
    assert num_seen >= 5


def model_of(config: dict[str, Any]) -> ModelSpec | None:
    """What the engine reads; None if it refuses the configuration."""
    try:
        return replace(read_model(config), ignored_keys=(), warnings=())
    except ConfigError:
        return None


def test_the_documents_have_every_architecture() -> None:
    """Oracle: the readers; docs/models.md also lists two names that stand for Qwen2 with another head."""
    root = Path(__file__).parents[3]
    table = (root / "docs" / "models.md").read_text(encoding="utf-8").split("## What is served")[1].split("\n\n")[1]
    rewards = {"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"}
    assert set(re.findall(r"`(\w+)`", table)) - rewards == set(families()), "docs/models.md, What is served"
    counts = re.findall(r"(\d+) architectures", (root / "README.md").read_text(encoding="utf-8"))
    assert counts and {*map(int, counts)} == {len(families())}, "README.md"
