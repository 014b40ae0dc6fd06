"""Gemma 2: four norms a layer, soft caps on scores and logits, every second layer with a window."""

from __future__ import annotations

from typing import Any

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec

ARCHITECTURES = ("Gemma2ForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Layers take turns: a window, all keys."""
    reader = gemma_reader(config)
    bias, softcap = reader.flag("attention_bias"), config.take("attn_logit_softcapping", float, 50.0)
    scale = reader.number("query_pre_attn_scalar", 256.0) ** -0.5
    windows = reader.windows(reader.take_window(4096), lambda index: index % 2 == 0)
    layers = tuple(
        gemma_layer(reader, reader.attention(scale=scale, window=window, softcap=softcap, qkv_bias=bias, out_bias=bias))
        for window in windows
    )
    cap = config.take("final_logit_softcapping", float, 30.0)
    return reader.model(layers, (reader.rope(),), tied=True, logit_softcap=cap, **gemma_whole(reader))


def gemma_reader(config: ConfigJson, **options: Any) -> DecoderReader:
    """The common keys in Gemma's words; attention to later tokens is refused."""
    config.expect("use_bidirectional_attention", bool, False)
    config.skip("hidden_act")  # transformers reads hidden_activation alone
    return DecoderReader(config, activation_key="hidden_activation", activation="gelu_pytorch_tanh", **options)


def gemma_layer(reader: DecoderReader, attention: AttentionSpec) -> LayerSpec:
    """A norm before and one behind each block; weights are stored minus 1."""
    return LayerSpec(
        attention=attention,
        mlp=reader.mlp(),
        input_norm=reader.norm("input_layernorm", offset=1.0),
        attention_out_norm=reader.norm("post_attention_layernorm", offset=1.0),
        mlp_norm=reader.norm("pre_feedforward_layernorm", offset=1.0),
        mlp_out_norm=reader.norm("post_feedforward_layernorm", offset=1.0),
    )


def gemma_whole(reader: DecoderReader) -> dict[str, Any]:
    """What Gemma 2 and 3 share of the whole model: scaled embeddings, a last norm like the others."""
    return {"embedding_scale": reader.hidden_size**0.5, "final_norm": reader.norm("norm", offset=1.0)}
