"""Ministral 3: YaRN, and queries scaled by how far they are behind the positions that the model was trained with."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.spec import USUAL_NAMES, CheckpointNames, ModelSpec

ARCHITECTURES = ("Ministral3ForCausalLM",)


def read(config: ConfigJson, names: CheckpointNames = USUAL_NAMES) -> ModelSpec:
    """As Mistral; ``llama_4_scaling_beta`` is among the numbers of the rotation."""
    reader = DecoderReader(config, eps=1e-5)
    windows = reader.windows(reader.take_window(), lambda index: True, is_free=False)
    layers = (reader.pre_norm_layer(reader.attention(window=window), reader.mlp()) for window in windows)
    return reader.model(tuple(layers), (reader.rope(),), names=names)
