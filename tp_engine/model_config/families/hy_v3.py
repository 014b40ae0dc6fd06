"""Hy3 of Tencent: experts by sigmoids with a correction, a shared MLP, normalised heads; the first layer is dense."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.deepseek import take_dense_layers
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

ARCHITECTURES = ("HYV3ForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Releases say ``expert_hidden_dim`` beside ``moe_intermediate_size``, and options of which each has one value."""
    reader = DecoderReader(config, eps=1e-5, defaults={"head_dim": 128})
    for name in ("qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid"):
        config.expect(name, bool, True)
    config.skip("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "use_grouped_mm")
    bias = reader.flag("attention_bias")
    attention = reader.attention(qkv_bias=bias, out_bias=bias, qk_norm=QkNormSpec(eps=reader.eps))
    dense, experts = reader.mlp(bias=reader.flag("mlp_bias")), _read_experts(reader)
    layers = tuple(
        reader.pre_norm_layer(attention, dense if is_dense else experts) for is_dense in take_dense_layers(reader, 1)
    )
    return reader.model(layers, (reader.rope(RopeRules(theta=11_158_840.0)),))


def _read_experts(reader: DecoderReader) -> ExpertsSpec:
    """The shared MLP is as wide as ``num_shared_experts`` experts."""
    config, inner = reader.config, reader.take_first("moe_intermediate_size", "expert_hidden_dim", default=1536)
    shared = inner * config.take_positive("num_shared_experts", 1)
    return reader.experts(
        reader.take_first("num_experts", "num_local_experts", default=192),
        RoutingRule(
            top_k=config.take_positive("num_experts_per_tok", 8),
            scores="sigmoid",
            renormalises=True,
            sum_eps=1e-20,
            factor=reader.factor("router_scaling_factor", 2.826),
        ),
        inner_size=inner,
        routes_in_float32=True,
        router="router.gate",
        correction="expert_bias",
        shared=MlpSpec(
            inner_size=shared, activation=reader.activation, name="shared_mlp", bias=reader.flag("mlp_bias")
        ),
    )
