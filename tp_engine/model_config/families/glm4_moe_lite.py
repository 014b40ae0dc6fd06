"""GLM-4.7-Flash and GLM-5: DeepSeek-V3's layers, with other sizes."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families.deepseek import latent_model, latent_reader, take_dense_layers
from tp_engine.model_config.families.glm4_moe import read_experts
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM")

_LITE = {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}


def read(config: ConfigJson) -> ModelSpec:
    """GLM-5 has an indexer: it is served up to ``index_topk`` positions."""
    is_lite = config.architecture == "Glm4MoeLiteForCausalLM"
    reader, latent = latent_reader(config, _LITE if is_lite else _LITE | {"q_lora_rank": 2048}, eps=1e-5)
    if not is_lite:
        config.expect("mlp_bias", bool, False)
        config.skip("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
        config.skip("indexer_rope_interleave")
    experts = read_experts(reader, factor=1.8 if is_lite else 2.5, top_k=4 if is_lite else 8)
    is_dense = take_dense_layers(reader, 1 if is_lite else 3)
    return latent_model(reader, latent, experts, is_dense, has_indexer=not is_lite)
