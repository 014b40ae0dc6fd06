"""DeepSeek V4: four streams of the residual, one row per token that is key and value, older tokens compressed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.compression import CompressionSpec, SharedRowSpec
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mla import IndexSpec
from tp_engine.model_config.mlp import FUSED, NUMBERED, Activation, ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.quantization import QuantizationSpec, WeightScheme
from tp_engine.model_config.rope import RopeRules, RopeSpec, parse_rope, take_rope
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.model_config.streams import HyperConnectionSpec

ARCHITECTURES = ("DeepseekV4ForCausalLM",)

_WINDOW, _OVERLAPPING, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_OVERLAPPING: 4, _HEAVY: 128}
_KINDS = {0: _WINDOW, 4: _OVERLAPPING, 128: _HEAVY}  # of compress_ratios
_DEFAULTS = {
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "intermediate_size": 2048,
    "max_position_embeddings": 1_048_576,
}
# From transformers' names to the vendor's, the more particular ones first.
_RENAMED = (
    ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
    ("compressor.indexer.q_b_proj", "indexer.wq_b"),
    ("compressor.indexer", "indexer.compressor"),
    ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.up_proj", "shared_experts.w3"),
    ("shared_experts.down_proj", "shared_experts.w2"),
    ("gate.e_score_correction_bias", "gate.bias"),
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn", "attn"),
    ("mlp", "ffn"),
    ("sinks", "attn_sink"),
    ("position_bias", "ape"),
    ("q_a_proj", "wq_a"),
    ("q_b_proj", "wq_b"),
    ("kv_proj", "wkv"),
    ("gate_proj", "wgate"),
    ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"),
    ("q_a_norm", "q_norm"),
    ("kv_norm", "norm"),
)
_NAMES = CheckpointNames(
    spellings=(("", "head."), ("model.", "head.")),  # the vendor's, and what transformers writes
    renamed=_RENAMED,
    outside=(("embed_tokens.", "embed."), ("hc_head.hc_", "hc_head_")),
)
_PLAIN = tuple(f"compressor.{part}{name}" for part in ("", "indexer.") for name in ("kv_proj", "gate_proj"))


def read(config: ConfigJson) -> ModelSpec:
    """Layers of three kinds, whose rotation is another one where they compress."""
    reader = DecoderReader(config, defaults={**_DEFAULTS, "intermediate_size": _inner_size(config)})
    for name in ("attention_bias", "mlp_bias"):
        config.expect(name, bool, False)
    kinds, rates = _take_kinds(reader), _take_rates(config)
    rope_dim, ropes = _take_ropes(reader)
    index = IndexSpec(
        num_heads=config.take_positive("index_n_heads", 64),
        dim=config.take_positive("index_head_dim", 128),
        top_k=config.take_positive("index_topk", 512),
        is_interleaved=True,
    )
    if index.dim < rope_dim:
        rule = f"qk_rope_head_dim, {rope_dim}, of its elements turn"
        raise config.refusal("index_head_dim", index.dim, rule, "correct config.json")
    compressions = {
        _WINDOW: None,
        _HEAVY: CompressionSpec(rate=rates[_HEAVY], dim=reader.head_dim, overlaps=False),
        _OVERLAPPING: CompressionSpec(rate=rates[_OVERLAPPING], dim=reader.head_dim, overlaps=True, index=index),
    }
    attend = _attention_of(reader, rope_dim)
    attentions = {kind: attend(one, 0 if kind == _WINDOW else 1) for kind, one in compressions.items()}
    experts, by_id = _read_experts(reader)
    streams = HyperConnectionSpec(
        count=config.take_positive("hc_mult", 4),
        attention="attn_hc",
        mlp="ffn_hc",
        end="hc_head",
        eps=reader.eps,
        floor=reader.number("hc_eps", 1e-6),
        num_steps=config.take_positive("hc_sinkhorn_iters", 20),
    )
    are_by_id = _take_routers(reader)
    layers = tuple(
        reader.pre_norm_layer(attentions[kind], by_id if is_by_id else experts, streams=streams)
        for kind, is_by_id in zip(kinds, are_by_id, strict=True)
    )
    config.skip("num_nextn_predict_layers")  # its tensors begin with mtp, and are not read
    expert_dtype = config.take_one_of("expert_dtype", "fp8", "fp4", remedy="use another checkpoint")
    spec = reader.model(layers, ropes, names=_NAMES, eos=(1,))
    return replace(spec, quantization=_as_stored(config, spec.quantization, has_fp4=expert_dtype == "fp4"))


def _as_stored(config: ConfigJson, quantization: QuantizationSpec | None, *, has_fp4: bool) -> QuantizationSpec | None:
    """``fp8`` as the vendor stores it: scales have another name, what compresses is plain, and experts may have codes
    of 4 bits."""
    if quantization is None:
        return None
    if quantization.method != "fp8":
        rule, remedy = "of this model only fp8 is read, with experts in FP8 or FP4", "take its maker's own upload"
        raise config.refusal("quantization_config.quant_method", quantization.method, rule, remedy)
    rules = tuple(
        (name, None if scheme is None else replace(scheme, scale_name="scale")) for name, scheme in quantization.rules
    )
    if has_fp4:
        fp4 = WeightScheme(packing="mxfp4-int8", kind="e2m1", group=32, scale_name="scale")
        rules = (("mlp.experts", fp4), *rules)
    return replace(quantization, rules=(*((name, None) for name in _PLAIN), *rules))


def _inner_size(config: ConfigJson) -> int:
    return config.take_positive("moe_intermediate_size", _DEFAULTS["intermediate_size"])


def _take_kinds(reader: DecoderReader) -> list[str]:
    """Each layer's kind: ``layer_types``, or ``compress_ratios``, which may have a draft head's behind them."""
    config, count = reader.config, reader.num_layers
    ratios, types = config.take("compress_ratios", list), config.take("layer_types", list)
    if types is None and ratios is not None:
        types = [_KINDS.get(one) if type(one) is int else None for one in ratios]
    if types is None:
        types = [_HEAVY] * 2 + [_OVERLAPPING if index % 2 else _HEAVY for index in range(max(0, count - 2))]
    found = [one for one in types[:count] if isinstance(one, str) and one in _KINDS.values()]
    if len(found) != count:
        name, legal = ("layer_types", _KINDS.values()) if ratios is None else ("compress_ratios", _KINDS)
        raise ConfigError(
            f"{config.origin}: {name} is {shown(types if ratios is None else ratios)}; it must have one of "
            f"{', '.join(map(str, legal))} for each of the {count} layers"
        )
    return found


def _take_rates(config: ConfigJson) -> Mapping[str, int]:
    """How many tokens an entry of each kind stands for."""
    own = config.take_object("compress_rates") or config.below({}, "compress_rates")
    old = {_OVERLAPPING: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
    rates = {
        kind: config.take_positive(old[kind], own.take_positive(kind, default)) for kind, default in _RATES.items()
    }
    own.finish_strictly()
    for kind, rate in rates.items():
        if rate & (rate - 1):
            raise config.refusal("compress_rates", {kind: rate}, "a rate must be a power of two", "use another model")
    return rates


def _take_ropes(reader: DecoderReader) -> tuple[int, tuple[RopeSpec, RopeSpec]]:
    """The elements of a head that turn, and the rotations of layers without and with compression."""
    config, dim = reader.config, reader.head_dim
    size, share = config.take("qk_rope_head_dim", int), config.take("partial_rotary_factor", float)
    share = share if share is not None else 1 / 8 if size is None else size / dim
    rope_dim = int(dim * share) if size is None else size
    thetas = {
        "main": reader.factor("rope_theta", 10_000.0),
        "compress": reader.factor("compress_rope_theta", 160_000.0),
    }
    given = take_rope(config)
    main, compress = given.take_object("main"), given.take_object("compress")
    if main is None or compress is None:
        # The rotation that is given is that of layers that compress; YaRN's factor for scores is not applied.
        scaled = {name: value for name, value in given.values.items() if name not in thetas}
        if "yarn" in (scaled.get("rope_type"), scaled.get("type")):
            scaled.setdefault("attention_factor", 1.0)
        given.skip(*given.names)
        main = config.below({}, "rope_parameters")
        compress = config.below({**scaled, "rope_theta": thetas["compress"]}, "rope_parameters")
    given.finish_strictly()
    ropes = []
    for kind, own in (("main", main), ("compress", compress)):
        rules = RopeRules(theta=thetas[kind], partial=share, is_interleaved=True)
        ropes.append(parse_rope(own, head_dim=dim, max_position=reader.max_position, rules=rules))
    if any(rope.rotary_dim != rope_dim for rope in ropes) or not 0 < rope_dim <= dim:
        rule = f"it must be what turns of a head_dim of {dim}"
        raise config.refusal("qk_rope_head_dim", rope_dim, rule, "correct config.json")
    return rope_dim, (ropes[0], ropes[1])


def _attention_of(reader: DecoderReader, rope_dim: int) -> Any:
    """A function of a layer's compression and rotation."""
    config = reader.config
    config.expect("num_key_value_heads", int, 1)
    groups = config.take_positive("o_groups", 8)
    if reader.num_heads % groups:
        rule = f"it must divide the {reader.num_heads} attention heads"
        raise config.refusal("o_groups", groups, rule, "correct config.json")
    sizes = {
        "query_rank": config.take_positive("q_lora_rank", 1024),
        "num_groups": groups,
        "group_rank": config.take_positive("o_lora_rank", 1024),
    }
    window = config.take_positive("sliding_window", 128)

    def attend(compression: CompressionSpec | None, rope: int) -> AttentionSpec:
        shared = SharedRowSpec(rope_dim=rope_dim, eps=reader.eps, compression=compression, **sizes)
        return reader.attention(num_kv_heads=1, window=window, has_sinks=True, rope=rope, shared_row=shared)

    return attend


def _read_experts(reader: DecoderReader) -> tuple[ExpertsSpec, ExpertsSpec]:
    """Those that scores choose, and those that are chosen by token id."""
    config = reader.config
    config.expect("scoring_func", str, "sqrtsoftplus")
    config.expect("norm_topk_prob", bool, True)
    config.expect("topk_method", str, "noaux_tc")
    limit = reader.factor("swiglu_limit", 10.0)
    activation = Activation("silu_clamped", limit=limit)
    rule = RoutingRule(
        top_k=config.take_positive("num_experts_per_tok", 6),
        scores="sqrt_softplus",
        renormalises=True,
        sum_eps=1e-20,
        factor=reader.number("routed_scaling_factor", 1.5),
    )
    config.expect("n_shared_experts", int, 1)
    shared = MlpSpec(inner_size=reader.inner_size, activation=activation, name="shared_experts")
    number = config.take_positive("n_routed_experts", 256)
    changes: dict[str, Any] = {"activation": activation, "shared": shared, "stored": (NUMBERED, FUSED)}
    chosen = reader.experts(number, rule, correction="gate.e_score_correction_bias", **changes)
    by_id = reader.experts(number, rule, by_id="gate.tid2eid", vocab_size=reader.vocab_size, **changes)
    return chosen, by_id


def _take_routers(reader: DecoderReader) -> Sequence[bool]:
    """Which layers choose experts by token id: as ``mlp_layer_types`` lists, or the first ``num_hash_layers``."""
    config, count = reader.config, reader.num_layers
    first = config.take("num_hash_layers", int, 3) or 0
    types = config.take("mlp_layer_types", list)
    if types is None:
        return [index < first for index in range(count)]
    if len(types) < count or any(one not in ("hash_moe", "moe") for one in types):
        raise ConfigError(
            f"{config.origin}: mlp_layer_types is {shown(types)}; it must say hash_moe or moe for each of the {count} "
            "layers"
        )
    return [one == "hash_moe" for one in types[:count]]
