"""HyperCLOVA X SEED: Granite's multipliers, and norms on the blocks' outputs too."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("HyperCLOVAXForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Logits are multiplied by ``logits_scaling``, by which Granite divides them."""
    reader = DecoderReader(config)
    config.skip("end_token_id")  # that of a document
    bias = reader.flag("attention_bias")
    attention = reader.attention(
        scale=reader.number("attention_multiplier", reader.head_dim**-0.5), qkv_bias=bias, out_bias=bias
    )
    has_out_norms = reader.flag("use_post_norm", True)
    layer = reader.pre_norm_layer(
        attention,
        reader.mlp(bias=reader.flag("mlp_bias")),
        attention_out_norm=reader.norm("post_norm1") if has_out_norms else None,
        mlp_out_norm=reader.norm("post_norm2") if has_out_norms else None,
        residual_scale=reader.number("residual_multiplier", 1.0),
    )
    return reader.model(
        (layer,) * reader.num_layers,
        (reader.rope(),),
        eos=(2,),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=reader.factor("logits_scaling", 1.0),
    )
