"""Kimi K2.5, K2.6 and K2.7: DeepSeek-V3's layers, as in Kimi K2."""

from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families.deepseek import read_v3
from tp_engine.model_config.names import LANGUAGE_MODEL_NAMES
from tp_engine.model_config.spec import ModelSpec

# The name on the hub, and that of transformers.
ARCHITECTURES = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
# Keys of the whole that are of images and videos, beside those that begin so.
_OF_IMAGES = ("ignore_index", "projection_hidden_size", "projection_layer_norm_eps", "use_unified_vision_chunk")
_NAMES = replace(LANGUAGE_MODEL_NAMES, skipped=(*LANGUAGE_MODEL_NAMES.skipped, "mm_projector.", "model.mm_projector."))


def read(config: ConfigJson) -> ModelSpec:
    """Embeddings are tied unless the file says otherwise, as in transformers; released files do."""
    config = config.changed(dict.fromkeys(_OF_IMAGES)).text_part("kimi_k2", "deepseek_v3")
    return read_v3(config, names=_NAMES, tied=True)
