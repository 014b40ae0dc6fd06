"""Granite 3, dense or with experts, and HyperCLOVA X SEED: Llama with multipliers for embeddings, scores, the blocks'
outputs and logits; HyperCLOVA X has norms on the blocks' outputs too."""

import dataclasses
from typing import Any

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import FUSED, ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.spec import AttentionSpec, ModelSpec

_DENSE, _SPARSE, _HYPERCLOVAX = "GraniteForCausalLM", "GraniteMoeForCausalLM", "HyperCLOVAXForCausalLM"
ARCHITECTURES = (_DENSE, _SPARSE, _HYPERCLOVAX)


def read(config: ConfigJson) -> ModelSpec:
    """HyperCLOVA X multiplies logits by ``logits_scaling``, by which Granite divides them."""
    reader, is_hyperclovax = DecoderReader(config), config.architecture == _HYPERCLOVAX
    changes: dict[str, Any] = {}
    if is_hyperclovax:
        config.skip("end_token_id")  # that of a document
        if reader.flag("use_post_norm", True):
            changes = {"attention_out_norm": reader.norm("post_norm1"), "mlp_out_norm": reader.norm("post_norm2")}
    attention = read_attention(reader, scale=None if is_hyperclovax else 1.0)
    is_sparse = config.architecture == _SPARSE
    config.expect("position_embedding_type", str, "rope")  # transformers 4.5x writes it, for a rotation that is there
    layer = reader.pre_norm_layer(
        attention,
        read_experts(reader, "block_sparse_moe") if is_sparse else reader.mlp(bias=reader.flag("mlp_bias")),
        residual_scale=reader.number("residual_multiplier", 1.0),
        **changes,
    )
    multipliers = read_multipliers(reader)
    if is_hyperclovax:
        multipliers["logit_scale"] = reader.factor("logits_scaling", 1.0)
    return reader.model((layer,) * reader.num_layers, (reader.rope(),), eos=(2,), **multipliers)


def read_attention(reader: DecoderReader, scale: float | None = 1.0, **changes: Any) -> AttentionSpec:
    """Return attention with a multiplier for scores: ``scale`` where it is absent, or, without one, the usual number,
    where it is null too."""
    bias, name = reader.flag("attention_bias"), "attention_multiplier"
    found = reader.config.take(name, float) if scale is None else reader.number(name, scale)
    own = {} if found is None else {"scale": found}
    return reader.attention(qkv_bias=bias, out_bias=bias, **own, **changes)


def read_multipliers(reader: DecoderReader) -> dict[str, Any]:
    """Return the multipliers of embeddings and of logits, which are divided by ``logits_scaling``."""
    return {
        "embedding_scale": reader.number("embedding_multiplier", 1.0),
        "logit_scale": 1.0 / reader.factor("logits_scaling", 1.0),
    }


def read_experts(reader: DecoderReader, name: str, *, below: str = "", shared: MlpSpec | None = None) -> ExpertsSpec:
    """Return a layer's experts, in one tensor ``below`` the module ``name``; the chosen ones' logits go through a
    softmax."""
    stored = dataclasses.replace(
        FUSED,
        gate=f"{below}input_linear",
        up=f"{below}input_linear",
        down=f"{below}output_linear",
        weight_suffix=".weight",
    )
    return reader.experts(
        reader.config.take_positive("num_local_experts", 8),
        RoutingRule(top_k=reader.config.take_positive("num_experts_per_tok", 2), scores="softmax_of_chosen"),
        router=f"{below}router.layer",
        shared=shared,
        stored=(stored,),
        name=name,
    )
