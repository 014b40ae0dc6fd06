"""Granite 3 (dense): Llama with multipliers for embeddings, scores, the blocks' outputs and logits."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("GraniteForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Logits are divided by ``logits_scaling``."""
    reader = DecoderReader(config)
    bias = reader.flag("attention_bias")
    attention = reader.attention(scale=reader.number("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    layer = reader.pre_norm_layer(
        attention,
        reader.mlp(bias=reader.flag("mlp_bias")),
        residual_scale=reader.number("residual_multiplier", 1.0),
    )
    return reader.model(
        (layer,) * reader.num_layers,
        (reader.rope(),),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )
