"""Gemma 2 and Gemma 3 (its text part): four norms a layer, weights stored minus 1, scaled embeddings."""

from typing import Any

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.names import LANGUAGE_MODEL_NAMES, USUAL_NAMES
from tp_engine.model_config.rope import RopeRules, RopeSpec, parse_rope, take_ropes
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec, QkNormSpec

ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_FULL, _WINDOW = 0, 1  # Gemma 3's two rotations


def read(config: ConfigJson) -> ModelSpec:
    """Refuse attention to later tokens, by both names."""
    return _read_gemma2(config) if config.architecture == "Gemma2ForCausalLM" else _read_gemma3(config)


def _read_gemma2(config: ConfigJson) -> ModelSpec:
    """Soft caps on scores and logits; every second layer has a window."""
    reader = _reader(config)
    bias, softcap = reader.flag("attention_bias"), reader.cap("attn_logit_softcapping", 50.0)
    scale = reader.factor("query_pre_attn_scalar", 256.0) ** -0.5
    window = reader.take_window(4096)
    if (again := config.take("sliding_window_size", int, window)) != window:
        raise config.refusal(
            "sliding_window_size", again, f"sliding_window is {window}", "use the same number for both"
        )
    windows = reader.windows(window, lambda index: index % 2 == 0)
    layers = tuple(
        _layer(reader, reader.attention(scale=scale, window=window, softcap=softcap, qkv_bias=bias, out_bias=bias))
        for window in windows
    )
    cap = reader.cap("final_logit_softcapping", 30.0)
    return reader.model(layers, (reader.rope(),), tied=True, eos=(1,), logit_softcap=cap, **_whole(reader))


def _read_gemma3(config: ConfigJson) -> ModelSpec:
    """Of every six layers, five have a window; the two kinds have a rotation each.

    Absent sizes are those of transformers: the files of models with vision leave many out.
    """
    is_wrapped = config.architecture != "Gemma3ForCausalLM"
    config = config.text_part() if is_wrapped else config
    reader = _reader(config, defaults=_GEMMA3_DEFAULTS)
    bias, qk_norm = reader.flag("attention_bias"), QkNormSpec(eps=reader.eps, offset=1.0)
    softcap = reader.cap("attn_logit_softcapping")
    scale = reader.factor("query_pre_attn_scalar", 256.0) ** -0.5
    config.skip("_sliding_window_pattern")  # as transformers writes it beside layer_types
    pattern = config.take_positive("sliding_window_pattern", 6)
    layers = tuple(
        _layer(
            reader,
            reader.attention(
                scale=scale,
                window=window,
                softcap=softcap,
                rope=_FULL if window is None else _WINDOW,
                qk_norm=qk_norm,
                qkv_bias=bias,
                out_bias=bias,
                sees_whole_images=is_wrapped,
            ),
        )
        for window in reader.windows(reader.take_window(4096), lambda index: (index + 1) % pattern != 0)
    )
    return reader.model(
        layers,
        _read_ropes(reader),
        tied=True,
        eos=(1,),
        logit_softcap=reader.cap("final_logit_softcapping"),
        names=LANGUAGE_MODEL_NAMES if is_wrapped else USUAL_NAMES,
        **_whole(reader),
    )


def _reader(config: ConfigJson, **options: Any) -> DecoderReader:
    """The common keys, by Gemma's names; attention to later tokens is refused."""
    config.expect("use_bidirectional_attention", bool, False)
    config.skip("hidden_act")  # transformers reads hidden_activation alone
    return DecoderReader(config, activation_key="hidden_activation", activation="gelu_pytorch_tanh", **options)


def _layer(reader: DecoderReader, attention: AttentionSpec) -> LayerSpec:
    """A norm before and one after each block; weights are stored minus 1."""
    return LayerSpec(
        attention=attention,
        mlp=reader.mlp(),
        input_norm=reader.norm("input_layernorm", offset=1.0),
        attention_out_norm=reader.norm("post_attention_layernorm", offset=1.0),
        mlp_norm=reader.norm("pre_feedforward_layernorm", offset=1.0),
        mlp_out_norm=reader.norm("post_feedforward_layernorm", offset=1.0),
    )


def _whole(reader: DecoderReader) -> dict[str, Any]:
    """What both share outside of the layers: scaled embeddings, a last norm like the others."""
    return {"embedding_scale": reader.hidden_size**0.5, "final_norm": reader.norm("norm", offset=1.0)}


def _read_ropes(reader: DecoderReader) -> tuple[RopeSpec, RopeSpec]:
    """``rope_parameters`` by kind of layer, or ``rope_theta`` with ``rope_scaling`` and ``rope_local_base_freq``."""
    config, sizes = reader.config, {"head_dim": reader.head_dim, "max_position": reader.max_position}
    theta, local = reader.number("rope_theta", 1_000_000.0), reader.number("rope_local_base_freq", 10_000.0)
    full, windowed = take_ropes(config)
    return (
        parse_rope(full, rules=RopeRules(theta=theta), **sizes),
        parse_rope(windowed, rules=RopeRules(theta=local), **sizes),
    )
