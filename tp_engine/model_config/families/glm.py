"""GLM-4: GLM-4-9B of 2024 (Glm) with Llama's layer, and the dense models of 2025 (Glm4) with four norms a layer."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")


def read(config: ConfigJson) -> ModelSpec:
    """Biases on query, key and value; ``gate_up_proj`` holds gate and up rows; half of each head turns, in pairs of
    neighbours."""
    reader = DecoderReader(config, eps=1.5625e-07)
    attention = reader.attention(qkv_bias=reader.flag("attention_bias", True))
    mlp = reader.mlp(fused_name="gate_up_proj")
    if config.architecture == "GlmForCausalLM":
        layer = reader.pre_norm_layer(attention, mlp)
    else:
        layer = LayerSpec(
            attention=attention,
            mlp=mlp,
            input_norm=reader.norm("input_layernorm"),
            attention_out_norm=reader.norm("post_self_attn_layernorm"),
            mlp_norm=reader.norm("post_attention_layernorm"),
            mlp_out_norm=reader.norm("post_mlp_layernorm"),
        )
    rope = reader.rope(RopeRules(partial=0.5, is_interleaved=True))
    return reader.model((layer,) * reader.num_layers, (rope,), eos=(151329, 151336, 151338))
