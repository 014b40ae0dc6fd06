"""Qwen with experts: Qwen2-MoE, which has a gated shared MLP too; Qwen3-MoE; the text part of Qwen3-VL-MoE."""

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.qwen import MULTIMODAL, WRAPPED
from tp_engine.model_config.mlp import EACH, FUSED, TRANSPOSED, MlpSpec, RoutingRule
from tp_engine.model_config.names import USUAL_NAMES
from tp_engine.model_config.rope import PLAIN
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration")


def read(config: ConfigJson) -> ModelSpec:
    """Return the two generations differ in their attention, windows and shared MLP."""
    return _read_qwen2(config) if config.architecture == "Qwen2MoeForCausalLM" else _read_qwen3(config)


def _read_qwen2(config: ConfigJson) -> ModelSpec:
    """With ``use_sliding_window``, every other layer before ``max_window_layers`` has a window."""
    reader = DecoderReader(config)
    shared = config.take_positive("shared_expert_intermediate_size", 5632)
    experts = reader.experts(
        config.require_positive("num_experts"),
        RoutingRule(top_k=config.take_positive("num_experts_per_tok", 4), renormalises=reader.flag("norm_topk_prob")),
        inner_size=config.require_positive("moe_intermediate_size"),
        shared=MlpSpec(inner_size=shared, activation=reader.activation, name="shared_expert"),
        shared_gate="shared_expert_gate",
    )
    bias, is_windowed = reader.flag("qkv_bias", True), reader.flag("use_sliding_window")
    window = config.take("sliding_window", int, None if config.has("sliding_window") else 4096) or None
    last = config.take("max_window_layers", int, 28) or 0
    windows = reader.windows(window if is_windowed else None, lambda index: index % 2 == 0 and index < last)
    layers = tuple(
        reader.pre_norm_layer(reader.attention(qkv_bias=bias, window=window), experts if is_sparse else reader.mlp())
        for window, is_sparse in zip(windows, take_sparse_layers(reader), strict=True)
    )
    return reader.model(layers, (reader.rope(),))


def _read_qwen3(config: ConfigJson) -> ModelSpec:
    """No biases unless ``attention_bias`` is set.  Qwen3-VL-MoE always renormalises the experts' weights."""
    is_wrapped = config.architecture != "Qwen3MoeForCausalLM"
    reader = DecoderReader(config.text_part() if is_wrapped else config)
    reader.config.expect("use_qk_norm", bool, True)
    reader.config.expect("shared_expert_intermediate_size", int, 0)
    bias, rope = reader.flag("attention_bias"), reader.rope(MULTIMODAL if is_wrapped else PLAIN)
    experts = reader.experts(
        reader.take_first("num_experts", "num_local_experts"),
        RoutingRule(
            top_k=reader.config.take_positive("num_experts_per_tok", 4 if is_wrapped else 8),
            renormalises=reader.flag("norm_topk_prob", is_wrapped),
        ),
        inner_size=reader.config.require_positive("moe_intermediate_size"),
        stored=(TRANSPOSED, EACH, FUSED) if is_wrapped else (EACH, FUSED),
    )
    window = reader.take_window(4096)
    window = window if reader.flag("use_sliding_window") else None
    reader.config.skip("max_window_layers")
    attention = reader.attention(qkv_bias=bias, out_bias=bias, qk_norm=QkNormSpec(eps=reader.eps), window=window)
    layers = tuple(
        reader.pre_norm_layer(attention, experts if is_sparse else reader.mlp())
        for is_sparse in take_sparse_layers(reader)
    )
    names = WRAPPED if is_wrapped else USUAL_NAMES
    return reader.model(layers, (rope,), names=names, **reader.take_dual_chunks())


def take_sparse_layers(reader: DecoderReader) -> list[bool]:
    """Return which layers have experts: every ``decoder_sparse_step``-th one, but for ``mlp_only_layers``."""
    step = reader.config.take_positive("decoder_sparse_step", 1)
    dense = reader.config.take("mlp_only_layers", list, []) or []
    if not all(type(index) is int and 0 <= index < reader.num_layers for index in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers is {shown(dense)}; it must list layers under {reader.num_layers}"
        )
    return [index not in dense and (index + 1) % step == 0 for index in range(reader.num_layers)]
