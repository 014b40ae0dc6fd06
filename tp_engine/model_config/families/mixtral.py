"""Mixtral: Mistral with experts."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import FUSED, NUMBERED, RoutingRule
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Return a router whose weights are the softmax of the chosen experts' logits."""
    reader = DecoderReader(config, eps=1e-5)
    experts = reader.experts(
        config.take_positive("num_local_experts", 8),
        RoutingRule(top_k=config.take_positive("num_experts_per_tok", 2), renormalises=True),
        stored=(NUMBERED, FUSED),
        name="block_sparse_moe",
    )
    layer = reader.pre_norm_layer(reader.attention(window=reader.take_window()), experts)
    return reader.model((layer,) * reader.num_layers, (reader.rope(RopeRules(theta=1e6)),), eos=(2,))
