"""Mistral 7B and its kin, Ministral 3, and the text part of Mistral Small 3; at first with a window on every layer."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families import mistral4
from tp_engine.model_config.names import LANGUAGE_MODEL_NAMES, USUAL_NAMES
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("MistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")


def read(config: ConfigJson) -> ModelSpec:
    """No biases; ``sliding_window`` may be null.  Mistral 3's text part is a Mistral, a Ministral 3 or a Mistral 4.

    Ministral 3 scales queries by their distance from the trained positions: its rotation has a
    ``llama_4_scaling_beta``.
    """
    is_wrapped, is_ministral3 = config.architecture == ARCHITECTURES[2], config.architecture == ARCHITECTURES[1]
    if is_wrapped:
        config = config.text_part()
        if config.peek("model_type") == "mistral4":
            return mistral4.read(config, LANGUAGE_MODEL_NAMES)
        is_ministral3 = config.peek("model_type") == "ministral3"
    reader = DecoderReader(config, eps=1e-5 if is_ministral3 else 1e-6)
    window = reader.take_window(None if is_ministral3 else 4096)
    windows = reader.windows(window, lambda index: True, is_free=False)
    layers = (reader.pre_norm_layer(reader.attention(window=window), reader.mlp()) for window in windows)
    return reader.model(tuple(layers), (reader.rope(),), names=LANGUAGE_MODEL_NAMES if is_wrapped else USUAL_NAMES)
