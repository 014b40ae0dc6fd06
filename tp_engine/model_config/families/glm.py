"""GLM-4-9B (2024, as transformers names it): Llama's layer; half of each head turns, pairs interleaved."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("GlmForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Biases on query, key and value; ``gate_up_proj`` holds gate and up rows."""
    reader = DecoderReader(config, eps=1.5625e-07)
    attention = reader.attention(qkv_bias=reader.flag("attention_bias", True))
    layer = reader.pre_norm_layer(attention, reader.mlp(fused_name="gate_up_proj"))
    return reader.model((layer,) * reader.num_layers, (reader.rope(RopeRules(partial=0.5, is_interleaved=True)),))
