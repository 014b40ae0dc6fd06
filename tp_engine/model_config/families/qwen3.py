"""Qwen3 (dense): every query and key head is normalised before it turns; the text part of Qwen3-VL."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.qwen2 import WRAPPED, take_windows
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import USUAL_NAMES, ModelSpec, QkNormSpec

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration")


def read(config: ConfigJson) -> ModelSpec:
    """No biases unless ``attention_bias`` is set; a free ``head_dim``."""
    is_wrapped = config.architecture != "Qwen3ForCausalLM"
    reader = DecoderReader(config.text_part() if is_wrapped else config)
    bias, qk_norm = reader.flag("attention_bias"), QkNormSpec(eps=reader.eps)
    layers = (
        reader.pre_norm_layer(
            reader.attention(qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, window=window), reader.mlp()
        )
        for window in take_windows(reader)
    )
    rope = reader.rope(RopeRules(is_multimodal=is_wrapped))
    return reader.model(tuple(layers), (rope,), names=WRAPPED if is_wrapped else USUAL_NAMES)
