"""The parity table: every family that the engine runs, as a tiny model with all of the family's features.

``tests/ranks/test_families.py`` compares each line with transformers at several world sizes and settings.  Each line is
also an architecture of ``tests.tiny_models.make_checkpoint``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The names of transformers' configuration and model, and the changes to ``make_checkpoint``'s settings.

    ``vision`` holds the settings of the vision part; the others are then those of the text part.  ``seed`` is chosen so
    that no token is near the border between two experts.  ``hub_name`` is what the hub's files call the model, where
    transformers has another name.  ``saves_own_names``: tensors have transformers' names, because those to which it
    converts them are not the hub's.
    """

    config: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None
    seed: int = 0
    hub_name: str | None = None
    saves_own_names: bool = False


_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 2.0, 4.0]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
_QUERY_SCALE = {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 0.5, "max_position_embeddings": 512}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP = {**_VISION, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
_PIXTRAL = {**_VISION, "image_size": 28, "patch_size": 14, "model_type": "pixtral", "head_dim": 16}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 32}
_EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}  # 3 ranks have 8, 16 and 16 of the 40
_SHARED = {**_EXPERTS, "moe_intermediate_size": 24}
_SLIDING_3_TO_1 = {"num_hidden_layers": 4, "sliding_window": 8}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
_LATENT = {
    **_SHARED,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# 16 heads: with fewer, so many scores are exactly 0 that transformers' choice among them matters.
_INDEX = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16}
_LATENT_YARN = {**_YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7}
# All three kinds of layers; the rates divide the smallest block, and the choice matters from the tenth token on.
_COMPRESSED = {
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "num_hash_layers": 1,
    "num_attention_heads": 48,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 32,
    "o_groups": 24,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "index_topk": 4,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "intermediate_size": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "rope_parameters": {**_YARN, "rope_theta": 1e4},
    "swiglu_limit": 0.5,
}
# The layers with the delta rule come first and last; 8 ranks have 3 value heads each, and one key head or 3.
_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_ONE_KEY_HEAD = {**_HYBRID, "linear_num_key_heads": 1}
_KEY_HEADS = {**_HYBRID, "linear_num_key_heads": 24}
_HYBRID_EXPERTS = {**_SHARED, "num_experts": 8, "shared_expert_intermediate_size": 48}
_HYBRID_VISION = {**_QWEN_VISION, "num_position_embeddings": 16}
_SHORT_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_GEMMA_VISION = {**_VISION, "num_key_value_heads": 2, "head_dim": 16, "model_type": "gemma4_vision"}

# 3 and 8 ranks have several groups each; transformers bounds steps in prompts alone, unless this is next to nothing.
_MAMBA = {
    "mamba_num_heads": 48,
    "n_groups": 24,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 1e-30,
}

# A single group, replicated on all ranks.
_GRANITE4 = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "intermediate_size": 40,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "mamba_n_heads": 24,
    "mamba_expand": 3,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.2,
}

# A dense family and one with experts, which run on every number of ranks.
EVERY_SIZE = ("llama", "qwen3-moe")

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": 20}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {"rope_parameters": {**_YARN, "rope_theta": 1e4}}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 20}),
    "phi4-mini": Family(
        "Phi3Config",
        "Phi3ForCausalLM",
        {"rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 512},
    ),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 9.0},
    ),
    "gemma3-vision": Family(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 24},
        vision=_SIGLIP,
    ),
    "gemma4": Family("Gemma4TextConfig", "Gemma4ForCausalLM", {**_GEMMA4, "final_logit_softcapping": 9.0}),
    "gemma4-experts": Family(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "moe_intermediate_size": 40,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
        },
        vision=_GEMMA_VISION,
        seed=10,
    ),
    "gemma4-e": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 8,
            "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, *["full_attention"] * 2],
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 203,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-unified": Family(
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        {**_GEMMA4, "final_logit_softcapping": 9.0, "model_type": "gemma4_unified_text"},
        vision={"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 8},
    ),
    "muse-glimmer": Family(
        "MuseGlimmerConfig",
        "MuseGlimmerForConditionalGeneration",
        {
            **_SLIDING_3_TO_1,
            "num_hidden_layers": 5,
            "qk_scale_factor": 2.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
            "post_norm_eps": 1e-3,
        },
        vision={**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": Family("Olmo3Config", "Olmo3ForCausalLM", {**_SLIDING_3_TO_1, "rope_scaling": _YARN}),
    "granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "hyperclovax": Family(
        "HyperCLOVAXConfig",
        "HyperCLOVAXForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    ),
    "exaone4.5": Family(
        "Exaone4_5_Config",
        "Exaone4_5_ForConditionalGeneration",
        {**_SLIDING_3_TO_1, "model_type": "exaone4"},
        vision={**_QWEN_VISION, "num_key_value_heads": 2, "out_hidden_size": 64},
    ),
    "glm": Family("GlmConfig", "GlmForCausalLM"),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM"),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "seed-oss": Family("SeedOssConfig", "SeedOssForCausalLM", {"attention_out_bias": True}),
    "exaone4": Family("Exaone4Config", "Exaone4ForCausalLM", _SLIDING_3_TO_1),
    "cohere2": Family("Cohere2Config", "Cohere2ForCausalLM", {**_SLIDING_3_TO_1, "logit_scale": 0.5}),
    "ministral3": Family(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {"rope_parameters": {**_YARN, **_QUERY_SCALE, "rope_theta": 1e4}},
    ),
    "mistral3-vision": Family(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": {**_YARN, **_QUERY_SCALE, "rope_theta": 1e4}},
        vision=_PIXTRAL,
    ),
    "qwen2-vl": Family(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {"rope_parameters": _MROPE},
        vision={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": _MROPE},
        vision=_QWEN_VISION,
    ),
    "qwen3-vl": Family(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision={**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "num_experts": 8, "num_hidden_layers": 3, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {**_EXPERTS, "num_experts": 8, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision={**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 48},
        seed=1,
    ),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "granite-moe": Family(
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "glm4-moe": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **_SHARED,
            "num_hidden_layers": 3,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        seed=8,
    ),
    "solar-open": Family(
        "SolarOpenConfig",
        "SolarOpenForCausalLM",
        {
            **_SHARED,
            "n_routed_experts": 8,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "rope_theta": 1e4},
        },
        seed=3,
    ),
    "hy-v3": Family(
        "HYV3Config",
        "HYV3ForCausalLM",
        {**_SHARED, "num_experts": 8, "num_hidden_layers": 3, "router_scaling_factor": 1.5},
        seed=5,
    ),
    "minimax-m2": Family(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        seed=1,
    ),
    "ernie4.5-moe": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 3},
        seed=2,
    ),
    "deepseek-v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None, "n_shared_experts": 2},
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, "rope_parameters": _LATENT_YARN}, seed=1
    ),
    "kimi-k2.5": Family(
        "Kimi_K25Config",
        "Kimi_K25ForConditionalGeneration",
        {**_LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": _LATENT_YARN, "model_type": "deepseek_v3"},
        vision={**_VISION, "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4},
        hub_name="KimiK25ForConditionalGeneration",
        saves_own_names=True,
    ),
    "glm-5.2": Family(
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            **_LATENT,
            **_INDEX,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 3,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        seed=9,
    ),
    "deepseek-v3.2": Family("DeepseekV32Config", "DeepseekV32ForCausalLM", {**_LATENT, **_INDEX}),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**_LATENT, "v_head_dim": 20, "rope_interleave": False},
        seed=1,
    ),
    "glm-moe-dsa": Family("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", {**_LATENT, "index_topk": 256}),
    "mistral4": Family(
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {**_LATENT, "rope_parameters": {**_LATENT_YARN, "llama_4_scaling_beta": 0.4}},
        seed=2,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "intermediate_size": 100,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
            "rope_parameters": {**_YARN, "rope_theta": 1e4, "truncate": False},
        },
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_ONE_KEY_HEAD, **_HYBRID_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
        seed=3,
    ),
    "qwen3.5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _KEY_HEADS),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_KEY_HEADS, **_HYBRID_EXPERTS, "linear_num_value_heads": 48, "num_hidden_layers": 4, "layer_types": None},
        seed=8,
    ),
    "nemotron-h": Family("NemotronHConfig", "NemotronHForCausalLM", {**_MAMBA, "hybrid_override_pattern": "M-*M-"}),
    "nemotron-3": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_MAMBA,
            **_SHARED,
            "hybrid_override_pattern": "EM*EM",
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "routed_scaling_factor": 1.5,
        },
        seed=12,
    ),
    "granite4": Family("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _GRANITE4, seed=4),
    "granite4-dense": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE4, "num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "qwen3.5-vision": Family("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _ONE_KEY_HEAD, vision=_HYBRID_VISION),
    "qwen3.5-moe-vision": Family(
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        {**_KEY_HEADS, **_HYBRID_EXPERTS},
        vision=_HYBRID_VISION,
        seed=3,
    ),
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        # The inner size becomes two thirds of the one given, rounded up to a multiple.
        {**_SHORT_CONV, "intermediate_size": 130, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.1},
    ),
    "lfm2-vision": Family(
        "Lfm2VlConfig",
        "Lfm2VlForConditionalGeneration",
        {**_SHORT_CONV, "block_auto_adjust_ff_dim": False},
        vision={**_VISION, "num_patches": 16, "patch_size": 4, "model_type": "siglip2_vision_model"},
    ),
    "lfm2-moe": Family(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**_SHORT_CONV, **_EXPERTS, "num_experts": 8, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "laguna": Family(
        "LagunaConfig",
        "LagunaForCausalLM",
        {
            **_SHARED,
            **_SLIDING_3_TO_1,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_attention_heads": 24,
            "num_attention_heads_per_layer": [24, 48, 24],
            "num_experts": 8,
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        seed=3,
    ),
    "deepseek-v4": Family("DeepseekV4Config", "DeepseekV4ForCausalLM", _COMPRESSED),
    "kimi-linear": Family(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **_LATENT,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 24,
            "linear_head_dim": 8,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "n_group": 1,
            "topk_group": 1,
        },
        seed=6,
    ),
}


# The families that have layers with experts.
OF_EXPERTS = [
    name
    for name, family in FAMILIES.items()
    if any(count for key, count in family.changes.items() if key.endswith("experts") and "shared" not in key)
]


def families_on(world_size: int) -> list[str]:
    """The families that run on this number of ranks: all on 1 and 2, and each on 3 or 4, alternately; ``EVERY_SIZE`` on
    all.

    What is particular to a number of ranks (uneven shares, replicated KV heads) is in the layers, which families share.
    """
    turn = {3: 0, 4: 1}.get(world_size)
    return [name for index, name in enumerate(FAMILIES) if turn in (None, index % 2) or name in EVERY_SIZE]
