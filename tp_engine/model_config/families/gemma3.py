"""Gemma 3: five layers with a window for each one with all keys, a rotation for either; without vision."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.gemma2 import gemma_layer, gemma_reader, gemma_whole
from tp_engine.model_config.families.mistral import WRAPPED
from tp_engine.model_config.rope import RopeRules, RopeSpec, parse_rope, take_rope_values
from tp_engine.model_config.spec import USUAL_NAMES, ModelSpec, QkNormSpec

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_FULL, _WINDOW = 0, 1  # of the two rotations


def read(config: ConfigJson) -> ModelSpec:
    """Absent sizes are those of transformers: the wrapper's files leave many out."""
    is_wrapped = config.architecture != "Gemma3ForCausalLM"
    config = config.text_part() if is_wrapped else config
    reader = gemma_reader(config, defaults=_DEFAULTS)
    bias, qk_norm = reader.flag("attention_bias"), QkNormSpec(eps=reader.eps, offset=1.0)
    softcap = config.take("attn_logit_softcapping", float)
    scale = reader.number("query_pre_attn_scalar", 256.0) ** -0.5
    config.skip("_sliding_window_pattern")  # as transformers writes it beside layer_types
    pattern = config.take_positive("sliding_window_pattern", 6)
    layers = tuple(
        gemma_layer(
            reader,
            reader.attention(
                scale=scale,
                window=window,
                softcap=softcap,
                rope=_FULL if window is None else _WINDOW,
                qk_norm=qk_norm,
                qkv_bias=bias,
                out_bias=bias,
            ),
        )
        for window in reader.windows(reader.take_window(4096), lambda index: (index + 1) % pattern != 0)
    )
    return reader.model(
        layers,
        _read_ropes(reader),
        tied=True,
        logit_softcap=config.take("final_logit_softcapping", float),
        names=WRAPPED if is_wrapped else USUAL_NAMES,
        **gemma_whole(reader),
    )


def _read_ropes(reader: DecoderReader) -> tuple[RopeSpec, RopeSpec]:
    """``rope_parameters`` by kind of layer, or ``rope_theta`` with ``rope_scaling`` and ``rope_local_base_freq``."""
    config, sizes = reader.config, {"head_dim": reader.head_dim, "max_position": reader.max_position}
    theta, local = reader.number("rope_theta", 1_000_000.0), reader.number("rope_local_base_freq", 10_000.0)
    name, values = take_rope_values(config)
    by_type = values if name == "rope_parameters" else {"full_attention": values}
    return (
        parse_rope(name, by_type.get("full_attention") or {}, rules=RopeRules(theta=theta), **sizes),
        parse_rope(name, by_type.get("sliding_attention") or {}, rules=RopeRules(theta=local), **sizes),
    )
