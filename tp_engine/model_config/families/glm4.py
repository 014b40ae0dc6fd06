"""GLM-4 (dense, 0414): four norms a layer, half of each head turns, pairs interleaved."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Glm4ForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Biases on query, key and value; ``gate_up_proj`` holds gate and up rows."""
    reader = DecoderReader(config, eps=1.5625e-07)
    layer = LayerSpec(
        attention=reader.attention(qkv_bias=reader.flag("attention_bias", True)),
        mlp=reader.mlp(fused_name="gate_up_proj"),
        input_norm=reader.norm("input_layernorm"),
        attention_out_norm=reader.norm("post_self_attn_layernorm"),
        mlp_norm=reader.norm("post_attention_layernorm"),
        mlp_out_norm=reader.norm("post_mlp_layernorm"),
    )
    rope = reader.rope(RopeRules(partial=0.5, is_interleaved=True))
    return reader.model((layer,) * reader.num_layers, (rope,))
