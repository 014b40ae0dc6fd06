"""MiniMax-M2: experts by sigmoids, queries and keys normalised over all heads, part of each head turns."""

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import FUSED, NUMBERED, RoutingRule
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
_FULL_ATTENTION = 1


def read(config: ConfigJson) -> ModelSpec:
    """Releases give ``rotary_dim``, transformers ``partial_rotary_factor``."""
    reader = DecoderReader(config)
    rotary_dim = config.take("rotary_dim", int, reader.head_dim)
    assert rotary_dim is not None
    config.expect("scoring_func", str, "sigmoid")
    config.expect("use_qk_norm", bool, True)
    config.expect("qk_norm_type", str, "per_layer")
    config.expect("use_routing_bias", bool, True)
    config.expect("shared_intermediate_size", int, 0)
    for part in ("full_attention", "linear_attention", "mlp"):
        config.expect(f"layernorm_{part}_beta", float, 1.0)
    if any(kind != _FULL_ATTENTION for kind in config.take("attn_type_list", list, []) or []):
        raise ConfigError(
            "config.json: attn_type_list names layers without full attention, which is not supported here"
        )
    config.skip("mlp_intermediate_size", "shared_moe_mode")
    experts = reader.experts(
        config.take_positive("num_local_experts", 256),
        RoutingRule(top_k=config.take_positive("num_experts_per_tok", 8), scores="sigmoid", renormalises=True),
        correction="e_score_correction_bias",
        stored=(NUMBERED, FUSED),
        name="block_sparse_moe",
    )
    layer = reader.pre_norm_layer(reader.attention(qk_norm=QkNormSpec(eps=reader.eps, spans_heads=True)), experts)
    rope = reader.rope(RopeRules(theta=5e6, partial=rotary_dim / reader.head_dim))
    return reader.model((layer,) * reader.num_layers, (rope,), eos=(200020,))
