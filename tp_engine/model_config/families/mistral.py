"""Mistral 7B and its kin, at first with a window on every layer; the text part of Mistral Small 3."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.ministral3 import read as read_ministral3
from tp_engine.model_config.spec import USUAL_NAMES, CheckpointNames, ModelSpec

ARCHITECTURES = ("MistralForCausalLM", "Mistral3ForConditionalGeneration")
WRAPPED = CheckpointNames(
    spellings=(("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")),
    skipped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)


def read(config: ConfigJson) -> ModelSpec:
    """No biases; ``sliding_window`` may be null.  Mistral 3's text part is a Mistral or a Ministral 3."""
    is_wrapped = config.architecture != "MistralForCausalLM"
    names = WRAPPED if is_wrapped else USUAL_NAMES
    config = config.text_part() if is_wrapped else config
    if config.peek("model_type") == "ministral3":
        return read_ministral3(config, names)
    reader = DecoderReader(config)
    windows = reader.windows(reader.take_window(4096), lambda index: True, is_free=False)
    layers = (reader.pre_norm_layer(reader.attention(window=window), reader.mlp()) for window in windows)
    return reader.model(tuple(layers), (reader.rope(),), names=names)
