"""Mistral 7B and its kin, Ministral 3, and the text part of Mistral Small 3; at first with a window on every layer."""

from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families import mistral4
from tp_engine.model_config.names import LANGUAGE_MODEL_NAMES, USUAL_NAMES, CheckpointNames
from tp_engine.model_config.rope import require_rope
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("MistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")


def read(config: ConfigJson) -> ModelSpec:
    """Mistral 3's text part is a Mistral, a Ministral 3 or a Mistral 4."""
    if config.architecture != ARCHITECTURES[2]:
        return _read(config, config.architecture == ARCHITECTURES[1], USUAL_NAMES)
    config = config.text_part()
    kind = config.take_one_of("model_type", "mistral", "ministral3", "mistral4")
    if kind == "mistral4":
        spec = mistral4.read(config, LANGUAGE_MODEL_NAMES)
    else:
        spec = _read(config, kind == "ministral3", LANGUAGE_MODEL_NAMES)
    if config.has("tie_word_embeddings"):
        return spec
    return replace(spec, tie_word_embeddings=True, has_own_head=True)  # the default, but released files have a head


def _read(config: ConfigJson, is_ministral3: bool, names: CheckpointNames) -> ModelSpec:
    """No biases; ``sliding_window`` may be null.

    Ministral 3 scales queries by their distance from the trained positions: its rotation has a
    ``llama_4_scaling_beta``.
    """
    reader = DecoderReader(config, eps=1e-5 if is_ministral3 else 1e-6)
    if is_ministral3:
        require_rope(config)
    window = reader.take_window(None if is_ministral3 else 4096)
    windows = reader.windows(window, lambda index: True, is_free=False)
    layers = tuple(reader.pre_norm_layer(reader.attention(window=window), reader.mlp()) for window in windows)
    return reader.model(layers, (reader.rope(),), names=names, eos=(2,))
