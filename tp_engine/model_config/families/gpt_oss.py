"""gpt-oss: every layer has experts and sinks, every other one a window, all projections have biases."""

import dataclasses

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import TRANSPOSED, Activation, RoutingRule
from tp_engine.model_config.rope import RopeRules, require_rope
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("GptOssForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Gate and up columns of the experts alternate; the first layer has a window."""
    reader = DecoderReader(config, eps=1e-5, defaults={"num_key_value_heads": 8, "head_dim": 64})
    bias = reader.flag("attention_bias", True)
    config.skip("initial_context_length")
    experts = reader.experts(
        reader.take_first("num_local_experts", "num_experts"),
        RoutingRule(
            top_k=reader.take_first("num_experts_per_tok", "experts_per_token", default=4), scores="softmax_of_chosen"
        ),
        activation=Activation(
            "swiglu_clamped", reader.number("swiglu_alpha", 1.702), reader.factor("swiglu_limit", 7.0)
        ),
        bias=True,
        router="router",
        router_bias=True,
        stored=(dataclasses.replace(TRANSPOSED, interleaved=True),),
    )
    windows = reader.windows(reader.take_window(128), lambda index: index % 2 == 0)
    layers = tuple(
        reader.pre_norm_layer(reader.attention(qkv_bias=bias, out_bias=bias, has_sinks=True, window=window), experts)
        for window in windows
    )
    require_rope(config)
    return reader.model(layers, (reader.rope(RopeRules(theta=150000.0)),))
