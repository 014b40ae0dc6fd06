"""Seed-OSS: Llama with a separate option for the bias of the output projection."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("SeedOssForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """``attention_bias`` is for query, key and value, ``attention_out_bias`` for the output.  Null is no size of heads:
    they share the hidden size."""
    reader = DecoderReader(config, defaults={} if config.has("head_dim") else {"head_dim": 128})
    attention = reader.attention(
        qkv_bias=reader.flag("attention_bias", True), out_bias=reader.flag("attention_out_bias")
    )
    layer = reader.pre_norm_layer(attention, reader.mlp(bias=reader.flag("mlp_bias")))
    return reader.model((layer,) * reader.num_layers, (reader.rope(),), eos=(2,))
