"""Granite 3, dense or with experts: Llama with multipliers for embeddings, scores, the blocks' outputs and logits."""

import dataclasses

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import FUSED, ExpertsSpec, RoutingRule
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("GraniteForCausalLM", "GraniteMoeForCausalLM")
_STORED = dataclasses.replace(
    FUSED, gate="input_linear", up="input_linear", down="output_linear", weight_suffix=".weight"
)


def read(config: ConfigJson) -> ModelSpec:
    """Logits are divided by ``logits_scaling``."""
    reader = DecoderReader(config)
    bias = reader.flag("attention_bias")
    attention = reader.attention(scale=reader.number("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    is_dense = config.architecture == "GraniteForCausalLM"
    layer = reader.pre_norm_layer(
        attention,
        reader.mlp(bias=reader.flag("mlp_bias")) if is_dense else _read_experts(reader),
        residual_scale=reader.number("residual_multiplier", 1.0),
    )
    return reader.model(
        (layer,) * reader.num_layers,
        (reader.rope(),),
        eos=(2,),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / reader.factor("logits_scaling", 1.0),
    )


def _read_experts(reader: DecoderReader) -> ExpertsSpec:
    """The experts of a layer are in one tensor; the chosen ones' logits go through a softmax."""
    return reader.experts(
        reader.config.take_positive("num_local_experts", 8),
        RoutingRule(top_k=reader.config.take_positive("num_experts_per_tok", 2), scores="softmax_of_chosen"),
        router="router.layer",
        stored=(_STORED,),
        name="block_sparse_moe",
    )
