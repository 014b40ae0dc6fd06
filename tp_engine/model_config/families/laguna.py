"""Laguna: heads and windows by layer, softplus gates on the heads' outputs, experts by sigmoids with a shared MLP."""

from tp_engine.errors import shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.deepseek import take_dense_layers
from tp_engine.model_config.head_gate import HeadGateSpec
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.rope import RopeRules, RopeSpec, parse_rope, take_ropes
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

ARCHITECTURES = ("LagunaForCausalLM",)
_DEFAULTS = {
    "vocab_size": 100_352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
_FULL, _WINDOW = 0, 1  # the two rotations


def read(config: ConfigJson) -> ModelSpec:
    """The first layer is dense unless ``mlp_layer_types`` says otherwise; no projection has a bias."""
    config = _without_outer_positions(config)
    for name in ("attention_bias", "qkv_bias", "moe_apply_router_weight_on_input", "swa_attention_sink_enabled"):
        config.expect(name, bool, False)
    for name in ("norm_topk_prob", "use_qk_norm"):
        config.expect(name, bool, True)
    config.expect("first_k_dense_replace", int, 1)
    if config.has("mlp_layer_types"):
        config.skip("mlp_only_layers", "decoder_sparse_step")  # the same in other words
    config.skip("partial_rotary_factor")  # the rotations say their own
    reader = DecoderReader(config, defaults=_DEFAULTS)
    gate, experts, qk_norm = _read_gate(reader), _read_experts(reader), QkNormSpec(eps=reader.eps)
    windows = reader.windows(_read_window(config), lambda index: False)
    layers = tuple(
        reader.pre_norm_layer(
            reader.attention(
                num_heads=num_heads,
                window=window,
                rope=_FULL if window is None else _WINDOW,
                qk_norm=qk_norm,
                gate=gate,
            ),
            reader.mlp() if is_dense else experts,
        )
        for num_heads, window, is_dense in zip(_read_heads(reader), windows, take_dense_layers(reader, 1), strict=True)
    )
    return reader.model(layers, _read_ropes(reader))


def _without_outer_positions(config: ConfigJson) -> ConfigJson:
    """Some files repeat the first rotation's original positions beside the rotations."""
    rotations = config.peek("rope_parameters")
    if not isinstance(rotations, dict):
        return config
    own = {name: value for name, value in rotations.items() if name != "original_max_position_embeddings"}
    return config.changed({"rope_parameters": own})


def _read_window(config: ConfigJson) -> int | None:
    """0, as in Laguna M's file, means that there are none."""
    window = config.take("sliding_window", int, 512)
    if window is not None and window < 0:
        raise config.refusal("sliding_window", window, "it must be positive, or 0 for none", "correct config.json")
    return window or None


def _read_gate(reader: DecoderReader) -> HeadGateSpec:
    """True is one for each head, and ``gating_types`` says for each layer what ``gating`` says for all."""
    config = reader.config
    asked = config.peek("gating") if config.has("gating") else True
    config.skip("gating")
    kind = "per-head" if asked is True else asked
    if kind not in ("per-head", "per-element"):
        raise config.refusal("gating", asked, "it must be true, per-head or per-element", "use another model")
    of_layers = config.take("gating_types", list)
    if of_layers not in (None, [kind.replace("-", "_")] * reader.num_layers):
        raise config.refusal("gating_types", of_layers, f"gating is {shown(asked)}", "correct one of the two")
    return HeadGateSpec(name="g_proj", function="softplus", is_per_head=kind == "per-head")


def _read_heads(reader: DecoderReader) -> list[int]:
    """Each layer's number of queries."""
    found = reader.config.take("num_attention_heads_per_layer", list)
    if found is None:
        return [reader.num_heads] * reader.num_layers
    groups = reader.num_kv_heads
    if len(found) != reader.num_layers or not all(type(one) is int and 0 < one < 1 << 16 for one in found):
        rule = f"it must have a number of heads for each of the {reader.num_layers} layers"
        raise reader.config.refusal("num_attention_heads_per_layer", found, rule, "correct config.json")
    if any(one % groups for one in found):
        rule = f"each must be a multiple of num_key_value_heads, {groups}"
        raise reader.config.refusal("num_attention_heads_per_layer", found, rule, "correct config.json")
    return found


def _read_experts(reader: DecoderReader) -> ExpertsSpec:
    config, cap = reader.config, reader.number("moe_router_logit_softcapping", 0.0)
    if cap < 0:
        raise config.refusal("moe_router_logit_softcapping", cap, "it must be above 0, or 0 for none", "correct it")
    return reader.experts(
        config.take_positive("num_experts", 256),
        RoutingRule(
            top_k=config.take_positive("num_experts_per_tok", 8),
            scores="sigmoid",
            renormalises=True,
            factor=reader.number("moe_routed_scaling_factor", 1.0),
        ),
        inner_size=config.take_positive("moe_intermediate_size", 512),
        router_cap=cap or None,
        correction="experts.e_score_correction_bias",
        shared=MlpSpec(
            inner_size=config.take_positive("shared_expert_intermediate_size", 512),
            activation=reader.activation,
            name="shared_expert",
        ),
    )


def _read_ropes(reader: DecoderReader) -> tuple[RopeSpec, ...]:
    """Those of layers without a window and with one; without any description half of a full layer's heads turns."""
    partial = 1.0 if reader.config.peek("rope_parameters") else 0.5
    rules = RopeRules(theta=5e5, partial=partial), RopeRules(partial=1.0)
    return tuple(
        parse_rope(one, head_dim=reader.head_dim, max_position=reader.max_position, rules=rule)
        for one, rule in zip(take_ropes(reader.config), rules, strict=True)
    )
