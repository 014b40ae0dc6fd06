"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections on disk, LongRoPE.

In Phi-4-mini only a part of each head turns.
"""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("Phi3ForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """``qkv_proj`` holds query, key and value rows, ``gate_up_proj`` gate and up rows."""
    reader = DecoderReader(config, eps=1e-5)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.expect(key, int, 1)
    windows = reader.windows(reader.take_window(), lambda index: True, is_free=False)
    mlp = reader.mlp(fused_name="gate_up_proj")
    layers = (reader.pre_norm_layer(reader.attention(window=window, fused_name="qkv_proj"), mlp) for window in windows)
    return reader.model(tuple(layers), (reader.rope(RopeRules(partial=1.0)),), eos=(32000,))
