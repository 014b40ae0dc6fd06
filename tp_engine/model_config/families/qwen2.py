"""Qwen2 and Qwen2.5: biases on query, key and value; the text part of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import USUAL_NAMES, CheckpointNames, ModelSpec

ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
WRAPPED = CheckpointNames(
    spellings=(("model.", "lm_head."), ("model.language_model.", "lm_head.")), skipped=("visual.", "model.visual.")
)


def read(config: ConfigJson) -> ModelSpec:
    """With ``use_sliding_window``, layers from ``max_window_layers`` on have a window."""
    is_wrapped = config.architecture != "Qwen2ForCausalLM"
    reader = DecoderReader(config.text_part() if is_wrapped else config)
    windows = take_windows(reader)
    layers = (reader.pre_norm_layer(reader.attention(qkv_bias=True, window=one), reader.mlp()) for one in windows)
    rope = reader.rope(RopeRules(is_multimodal=is_wrapped))
    return reader.model(tuple(layers), (rope,), names=WRAPPED if is_wrapped else USUAL_NAMES)


def take_windows(reader: DecoderReader) -> tuple[int | None, ...]:
    """Qwen's rule for windows; the defaults for absent keys are those of transformers."""
    window = reader.take_window(4096)
    enabled = reader.flag("use_sliding_window")
    first = reader.config.take("max_window_layers", int, 28) or 0
    return reader.windows(window if enabled else None, lambda index: index >= first)
