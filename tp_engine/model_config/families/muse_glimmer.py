"""Muse Glimmer (its text part): Gemma 2's four norms, a gate on each head's output, normalised embeddings; layers
without a window do not turn."""

from collections.abc import Sequence

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.head_gate import HeadGateSpec
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, QkNormSpec

ARCHITECTURES = ("MuseGlimmerForConditionalGeneration",)
_PERIOD = 4  # the last of every four layers, counted from the model's last one, has no window
_OF_IMAGES = ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection.")
_NAMES = CheckpointNames(spellings=(("model.language_model.", "lm_head."),), skipped=_OF_IMAGES)
_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
"""Those of transformers, as the files of models with vision leave many out."""


def read(config: ConfigJson) -> ModelSpec:
    """Refuse an output head that is the embedding, whose rows are normalised as they are loaded."""
    config = config.text_part("muse_glimmer_text")
    reader = DecoderReader(config, eps=1e-5, activation_key="hidden_activation", defaults=_DEFAULTS)
    config.expect("tie_word_embeddings", bool, False)
    rope = reader.rope()
    after = reader.number("post_norm_eps", 1e-8)
    scale = reader.factor("qk_scale_factor", 3.87) * reader.head_dim**-0.5
    bias = reader.flag("attention_bias")
    turning = _turning(reader, rope)
    windows = reader.windows(reader.take_window(2048), lambda index: bool((reader.num_layers - 1 - index) % _PERIOD))
    layers = tuple(
        _layer(
            reader,
            reader.attention(
                scale=scale,
                window=window,
                rope=0 if turns else None,
                qk_norm=QkNormSpec(eps=reader.eps, has_weights=False),
                qkv_bias=bias,
                out_bias=bias,
                gate=HeadGateSpec(name="gate_proj"),
            ),
            after,
        )
        for window, turns in zip(windows, turning, strict=True)
    )
    return reader.model(
        layers,
        (rope,),
        eos=(200_001,),
        embedding_eps=reader.eps,
        logit_scale=reader.factor("output_multiplier", 0.19611613513818404),
        logit_softcap=reader.cap("final_logit_softcapping", 20.0),
        names=_NAMES,
    )


def _layer(reader: DecoderReader, attention: AttentionSpec, after: float) -> LayerSpec:
    """A norm before and one after each block, those with an epsilon of their own; weights are stored minus 1."""
    return LayerSpec(
        attention=attention,
        mlp=reader.mlp(),
        input_norm=reader.norm("input_layernorm", offset=1.0),
        attention_out_norm=NormSpec(name="post_attention_layernorm", eps=after, offset=1.0),
        mlp_norm=reader.norm("pre_feedforward_layernorm", offset=1.0),
        mlp_out_norm=NormSpec(name="post_feedforward_layernorm", eps=after, offset=1.0),
    )


def _turning(reader: DecoderReader, rope: RopeSpec) -> Sequence[bool]:
    """Which layers turn: those whose ``layer_rope_theta`` is not 0, where it must be the model's."""
    thetas = reader.config.take("layer_rope_theta", list)
    if thetas is None:
        return [bool((reader.num_layers - 1 - index) % _PERIOD) for index in range(reader.num_layers)]
    if len(thetas) != reader.num_layers or any(theta not in (0, rope.theta) for theta in thetas):
        raise ConfigError(
            f"{reader.config.origin}: layer_rope_theta is {shown(thetas)}; for each of the {reader.num_layers} layers "
            f"it must be 0, for one that does not turn, or the model's rope_theta, {rope.theta:g}"
        )
    return [theta != 0 for theta in thetas]
