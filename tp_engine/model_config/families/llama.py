"""Llama 2, 3, 3.1 and later text models."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """``attention_bias`` and ``mlp_bias`` are optional."""
    reader = DecoderReader(config)
    bias = reader.flag("attention_bias")
    config.expect("activation", str, "swiglu")  # another name of hidden_act silu, in Falcon 3
    reader.windows(None, lambda index: False, is_free=False)
    layer = reader.pre_norm_layer(
        reader.attention(qkv_bias=bias, out_bias=bias), reader.mlp(bias=reader.flag("mlp_bias"))
    )
    return reader.model((layer,) * reader.num_layers, (reader.rope(),), eos=(2,))
