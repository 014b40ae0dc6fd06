"""LFM2 and LFM2.5 of Liquid AI, dense and with experts, and the text part of LFM2-VL: most layers have a short
convolution, the others attention with normalised heads."""

from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import FUSED, NUMBERED, ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.names import LANGUAGE_MODEL_NAMES, CheckpointNames
from tp_engine.model_config.recurrent import ShortConvSpec
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import LayerSpec, ModelSpec, QkNormSpec
from tp_engine.system.units import round_up

_DENSE, _SPARSE, _WRAPPER = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"
ARCHITECTURES = (_DENSE, _SPARSE, _WRAPPER)
_NAMES = CheckpointNames(
    renamed=(
        ("self_attn.o_proj", "self_attn.out_proj"),
        ("self_attn.q_norm", "self_attn.q_layernorm"),
        ("self_attn.k_norm", "self_attn.k_layernorm"),
        ("feed_forward.gate_proj", "feed_forward.w1"),
        ("feed_forward.up_proj", "feed_forward.w3"),
        ("feed_forward.down_proj", "feed_forward.w2"),
    )
)
_WRAPPED_NAMES = replace(_NAMES, spellings=LANGUAGE_MODEL_NAMES.spellings, skipped=LANGUAGE_MODEL_NAMES.skipped)
# Keys of the whole that are of images, beside those that begin so.
_OF_IMAGES = (
    *("do_image_splitting", "downsample_factor", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
    *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_thumbnail"),
    "use_image_special_tokens",
)
_KINDS = {"conv": False, "full_attention": True}
_SIZES = {"num_key_value_heads": 8, "max_position_embeddings": 128_000}
_SPARSE_SIZES = {**_SIZES, "intermediate_size": 7168}
# Keys of older files, and the key that each stands for: it has precedence.
_OLDER = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}


def read(config: ConfigJson) -> ModelSpec:
    """Absent keys are as in transformers.  Older files say sizes twice, in keys of their own."""
    is_sparse, is_wrapped = config.architecture == _SPARSE, config.architecture == _WRAPPER
    if is_wrapped:
        config = _with_newer_keys(config.changed(dict.fromkeys(_OF_IMAGES))).text_part("lfm2")
        config = config.changed({"tie_embedding": None})  # the whole's holds
    config = _with_newer_keys(config)
    config.skip("architectures", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
    config.skip("conv_use_xavier_init", "block_norm_eps", "model_name", "num_heads", "theta")  # transformers has others
    config.expect("conv_bias", bool, False)
    for name in ("block_use_swiglu", "use_pos_enc"):
        config.expect(name, bool, True)
    reader = DecoderReader(config, eps_key="norm_eps", eps=1e-5, defaults=_SPARSE_SIZES if is_sparse else _SIZES)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        config.expect(name, int, reader.hidden_size)
    taps = config.take_positive("conv_L_cache", 3, least=2)
    attention = reader.attention(qk_norm=QkNormSpec(eps=reader.eps))
    conv = ShortConvSpec(num_channels=reader.hidden_size, taps=taps)
    inner = reader.inner_size if is_sparse else _adjusted(reader)
    dense = MlpSpec(inner_size=inner, activation=reader.activation, name="feed_forward")
    experts, num_dense = _read_experts(reader) if is_sparse else (dense, reader.num_layers)
    layers = tuple(
        LayerSpec(
            attention=attention if attends else conv,
            mlp=dense if index < num_dense else experts,
            input_norm=reader.norm("operator_norm"),
            mlp_norm=reader.norm("ffn_norm"),
        )
        for index, attends in enumerate(_take_kinds(reader))
    )
    changes = {"final_norm": reader.norm("embedding_norm"), "names": _WRAPPED_NAMES if is_wrapped else _NAMES}
    return reader.model(layers, (reader.rope(RopeRules(theta=1e6)),), tied=True, eos=(2,), **changes)


def _with_newer_keys(config: ConfigJson) -> ConfigJson:
    newer = {key: config.peek(older) for older, key in _OLDER.items() if config.peek(older) is not None}
    return config.changed(newer | dict.fromkeys(_OLDER))


def _take_kinds(reader: DecoderReader) -> list[bool]:
    """Which layers attend: as ``layer_types`` says, or those of ``full_attn_idxs``, or all."""
    chosen = reader.config.take("full_attn_idxs", list)
    implied = ["full_attention" if chosen is None or index in chosen else "conv" for index in range(reader.num_layers)]
    return reader.take_attending(_KINDS, implied)


def _adjusted(reader: DecoderReader) -> int:
    """The inner size that ``block_auto_adjust_ff_dim`` makes of the one in the file: two thirds, times a factor, up to
    a multiple."""
    is_adjusted = reader.flag("block_auto_adjust_ff_dim", True)
    factor = reader.factor("block_ffn_dim_multiplier", 1.0)
    unit = reader.config.take_positive("block_multiple_of", 256)
    return round_up(int(factor * int(2 * reader.inner_size / 3)), unit) if is_adjusted else reader.inner_size


def _read_experts(reader: DecoderReader) -> tuple[ExpertsSpec, int]:
    """The experts, and how many layers before them have none."""
    config = reader.config
    rule = RoutingRule(
        top_k=config.take_positive("num_experts_per_tok", 4),
        scores="sigmoid",
        renormalises=reader.flag("norm_topk_prob", True),
        sum_eps=1e-6,
        factor=reader.factor("routed_scaling_factor", 1.0),
    )
    experts = reader.experts(
        config.take_positive("num_experts", 32),
        rule,
        inner_size=config.take_positive("moe_intermediate_size", 1792),
        correction="expert_bias" if reader.flag("use_expert_bias", True) else None,
        stored=(NUMBERED, FUSED),
        name="feed_forward",
    )
    num_dense = config.take("num_dense_layers", int, 2)
    assert num_dense is not None
    return experts, num_dense
