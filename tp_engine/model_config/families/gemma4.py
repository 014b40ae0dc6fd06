"""Gemma 4 and its unified model of 12B (their text parts), dense or with experts beside the MLPs: heads of full layers
are wider."""

from collections.abc import Mapping
from dataclasses import replace

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import EACH, FUSED, RoutingRule
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.rope import RopeRules, RopeSpec, parse_rope, take_ropes
from tp_engine.model_config.spec import (
    AttentionSpec,
    BesideSpec,
    LayerEmbeddingSpec,
    LayerSpec,
    ModelSpec,
    QkNormSpec,
)

_UNIFIED = "Gemma4UnifiedForConditionalGeneration"
ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", _UNIFIED)
_DEFAULTS = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_FULL, _WINDOW = 0, 1  # the two rotations
# Quantised checkpoints have a module for each expert, some of them below moe.
_EACH_OF_MOE = replace(EACH, gate=f"moe.{EACH.gate}", up=f"moe.{EACH.up}", down=f"moe.{EACH.down}")
_NAMES = CheckpointNames(
    spellings=(("model.language_model.", "lm_head."),),
    skipped=tuple(
        f"model.{part}." for part in ("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio")
    ),
)


def read(config: ConfigJson) -> ModelSpec:
    """Read a Gemma 4: of six layers five have a window, and the last one never has; defaults are transformers'."""
    return _read(config, None)


def read_assistant(config: ConfigJson, sources: Mapping[bool, int]) -> ModelSpec:
    """Return an assistant (``assistant.py``), all of whose layers read keys and values of a served model.

    ``sources``: of its layer with this index those that see all keys (True), or those with a window.
    """
    model = _read(config, sources)
    if model.layer_embedding is not None or any(layer.beside is not None for layer in model.layers):
        raise ConfigError("config.json: text_config has experts or embeddings for each layer, which no assistant has")
    return model


def _read(config: ConfigJson, of_target: Mapping[bool, int] | None) -> ModelSpec:
    is_wrapped = config.architecture.endswith("ForConditionalGeneration")
    is_unified = config.architecture.startswith("Gemma4Unified")
    config = config.text_part() if is_wrapped or of_target is not None else config
    config.skip("hidden_act")
    _refuse_other_directions(config)
    reader = DecoderReader(
        config,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        defaults=_DEFAULTS | ({"max_position_embeddings": 262144} if is_unified else {}),
    )
    windows = (
        *reader.windows(reader.take_window(1024 if is_unified else 512), lambda index: (index + 1) % 6 != 0)[:-1],
        None,
    )
    shapes, sources = _head_shapes(reader, windows), _read_sources(reader, windows, of_target)
    beside, embedding = _read_experts(reader), _read_embedding(reader, 0 if is_unified else 256)
    is_wide = reader.flag("use_double_wide_mlp")
    layers = tuple(
        replace(_layer(reader, window, shape, source, is_wide), beside=beside, embedding=embedding)
        for window, shape, source in zip(windows, shapes, sources, strict=True)
    )
    return reader.model(
        layers,
        _read_ropes(reader, {shape[1] for shape, window in zip(shapes, windows, strict=True) if window is None}),
        tied=True,
        eos=(1,),
        embedding_scale=reader.hidden_size**0.5,
        logit_softcap=reader.cap("final_logit_softcapping"),
        names=_names(_NAMES if is_wrapped else USUAL_NAMES, sources),
    )


def _names(names: CheckpointNames, sources: list[int | None]) -> CheckpointNames:
    """Files have keys and values also of the layers that read others', which nothing reads."""
    layers = [index for index, source in enumerate(sources) if source is not None]
    unread = [
        f"{model}layers.{index}.self_attn.{name}."
        for model, _ in names.spellings
        for index in layers
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    return replace(names, skipped=(*names.skipped, *unread))


def _read_sources(
    reader: DecoderReader, windows: tuple[int | None, ...], of_target: Mapping[bool, int] | None
) -> list[int | None]:
    """Whose keys and values a layer reads: the last ``num_kv_shared_layers`` read those of the last layer of their kind
    before them; None: its own.  Those of an assistant all read those ``of_target``."""
    count = reader.config.take("num_kv_shared_layers", int, 0) or 0
    if of_target is not None:
        if count not in (0, reader.num_layers) or not {window is None for window in windows} <= set(of_target):
            rule = f"it must be {reader.num_layers}, all layers, each of a kind that the model has"
            raise reader.config.refusal("num_kv_shared_layers", count, rule, "use the assistant of this model")
        reader.config.skip("attention_k_eq_v")  # concerns what it does not have
        return [of_target[window is None] for window in windows]
    first = reader.num_layers - count
    last_of_kind = {window is None: index for index, window in enumerate(windows[: max(first, 0)])}
    if not 0 <= count < reader.num_layers or not {window is None for window in windows[first:]} <= set(last_of_kind):
        raise reader.config.refusal(
            "num_kv_shared_layers",
            count,
            f"it must be at least 0, and leave layers of each kind, of {reader.num_layers}, in front",
            "correct config.json",
        )
    return [last_of_kind[window is None] if index >= first else None for index, window in enumerate(windows)]


def _read_embedding(reader: DecoderReader, usual_size: int) -> LayerEmbeddingSpec | None:
    """Each layer's own embedding (E2B, E4B)."""
    config = reader.config
    size = config.take("hidden_size_per_layer_input", int, usual_size) or 0
    if size == 0:
        config.skip("vocab_size_per_layer_input")
        return None
    vocab_size = config.take_positive("vocab_size_per_layer_input", _DEFAULTS["vocab_size"])
    if size < 0 or vocab_size < reader.vocab_size:
        rule = f"it must be positive, and vocab_size_per_layer_input, {vocab_size}, no less than {reader.vocab_size}"
        raise config.refusal("hidden_size_per_layer_input", size, rule, "correct config.json")
    pad = config.take("pad_token_id", int, 0) or 0
    if not 0 <= pad < vocab_size:
        rule = f"images' tokens have the embeddings of this one in each layer: it must be from 0 to {vocab_size - 1}"
        raise config.refusal("pad_token_id", pad, rule, "correct config.json")
    return LayerEmbeddingSpec(
        size=size,
        image_token_id=pad,
        vocab_size=vocab_size,
        activation=reader.activation,
        norm=reader.norm("per_layer_projection_norm"),
        out_norm=reader.norm("post_per_layer_input_norm"),
    )


def _refuse_other_directions(config: ConfigJson) -> None:
    """Images alone would be attended to in both directions."""
    found = config.take("use_bidirectional_attention", str)
    if found not in (None, "vision"):
        raise config.refusal(
            "use_bidirectional_attention",
            found,
            "text is only attended to backwards",
            "use a model that generates text",
        )


def _head_shapes(reader: DecoderReader, windows: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """KV heads and head_dim of each layer: ``global_*`` keys (the hub), or ``per_layer_config`` (transformers 5)."""
    config = reader.config
    head_dim = config.take_positive("global_head_dim", 512)
    # Without shared projections, transformers does not read this key.
    kv_heads = reader.num_kv_heads
    if config.take("num_global_key_value_heads", int) is not None and config.peek("attention_k_eq_v"):
        kv_heads = config.require_positive("num_global_key_value_heads")
    usual, full = (reader.num_kv_heads, reader.head_dim), (kv_heads, head_dim)
    changes = config.take("per_layer_config", dict)
    if not config.has("per_layer_config"):
        return [full if window is None else usual for window in windows]
    found = config.below(changes or {}, "per_layer_config")  # empty, or null, where no layer differs
    indices = {f"{index:0{width}}": index for index in range(len(windows)) for width in range(1, 4)}  # "5", "05"
    if wrong := [name for name in found.names if name not in indices]:
        rule = f"its keys must be numbers of layers, 0 to {len(windows) - 1}"
        raise config.refusal("per_layer_config", found.names, rule, f"correct or remove {', '.join(map(repr, wrong))}")
    shapes = {indices[name]: _shape_of_layer(found.take_object(name), usual) for name in found.names}
    return [shapes.get(index, usual) for index in range(len(windows))]


def _shape_of_layer(own: ConfigJson | None, usual: tuple[int, int]) -> tuple[int, int]:
    if own is None:
        return usual
    found = own.take_positive("num_key_value_heads", usual[0]), own.take_positive("head_dim", usual[1])
    own.finish_strictly()
    return found


def _layer(
    reader: DecoderReader,
    window: int | None,
    shape: tuple[int, int],
    source: int | None,
    is_wide: bool,
) -> LayerSpec:
    """Four norms with plain weights; values are normalised too, and the stream is scaled at the layer's end.

    Layers that read the keys and values of a ``source`` have MLPs of twice the size if these are ``is_wide``.
    """
    num_kv_heads, head_dim = shape
    bias, mlp = reader.flag("attention_bias"), reader.mlp()
    attention: AttentionSpec = reader.attention(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        window=window,
        rope=_FULL if window is None else _WINDOW,
        qk_norm=QkNormSpec(eps=reader.eps, includes_values=source is None),
        kv_source=source,
        qkv_bias=bias,
        out_bias=bias,
        values_from_keys=source is None and window is None and reader.flag("attention_k_eq_v"),
        sees_whole_images=window is not None and reader.config.peek("use_bidirectional_attention") == "vision",
    )
    return LayerSpec(
        attention=attention,
        mlp=replace(mlp, inner_size=2 * mlp.inner_size) if is_wide and source is not None else mlp,
        input_norm=reader.norm("input_layernorm"),
        attention_out_norm=reader.norm("post_attention_layernorm"),
        mlp_norm=reader.norm("pre_feedforward_layernorm"),
        mlp_out_norm=reader.norm("post_feedforward_layernorm"),
        stream_scale="layer_scalar",
    )


def _read_experts(reader: DecoderReader) -> BesideSpec | None:
    """Experts in every layer, or in none."""
    config = reader.config
    if not reader.flag("enable_moe_block"):
        config.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    rule = RoutingRule(top_k=config.require_positive("top_k_experts"), renormalises=True)
    experts = reader.experts(
        config.require_positive("num_experts"),
        rule,
        inner_size=config.require_positive("moe_intermediate_size"),
        router="router.proj",
        router_scale="router.scale",
        router_eps=reader.eps,
        expert_scale="router.per_expert_scale",
        stored=(FUSED, EACH, _EACH_OF_MOE),
        name="",
    )
    return BesideSpec(
        experts=experts,
        norm=reader.norm("pre_feedforward_layernorm_2"),
        out_norm=reader.norm("post_feedforward_layernorm_2"),
        mlp_out_norm=reader.norm("post_feedforward_layernorm_1"),
    )


def _read_ropes(reader: DecoderReader, full_dims: set[int]) -> tuple[RopeSpec, RopeSpec]:
    """``rope_parameters`` by kind of layer."""
    if len(full_dims) != 1:
        raise ConfigError(
            f"config.json: per_layer_config gives full layers heads of {sorted(full_dims)} elements; this engine needs "
            "one size for all of them"
        )
    config, max_position = reader.config, reader.max_position
    if scaling := config.peek("rope_scaling"):
        raise config.refusal("rope_scaling", scaling, "it must be rope_parameters, by kind of layer", "write it so")
    full, windowed = take_ropes(config)
    if not config.peek("rope_parameters"):
        full = full.changed({"rope_type": "proportional", "partial_rotary_factor": 0.25})
    # transformers turns whole heads by other kinds, whatever the share
    of_full = RopeRules(theta=1_000_000.0, partial=1.0 if full.peek("rope_type") == "proportional" else None)
    return (
        parse_rope(full, head_dim=full_dims.pop(), max_position=max_position, rules=of_full),
        parse_rope(windowed, head_dim=reader.head_dim, max_position=max_position, rules=RopeRules(theta=10_000.0)),
    )
