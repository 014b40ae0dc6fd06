"""GLM-4.5, 4.6 and 4.7: experts by sigmoids, a shared MLP, half of each head turns; the first layers are dense.  Solar
Open: the same experts in every layer, and Llama's attention."""

from collections.abc import Mapping

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

_SOLAR_OPEN = "SolarOpenForCausalLM"
ARCHITECTURES = ("Glm4MoeForCausalLM", _SOLAR_OPEN)


def read(config: ConfigJson) -> ModelSpec:
    """Norms of heads are optional, but for Solar Open, which has none; all of its heads turns, unless
    ``partial_rotary_factor`` says less."""
    if config.architecture == _SOLAR_OPEN:
        config.expect("use_qk_norm", bool, False)
        config.expect("first_k_dense_replace", int, 0)
        # No layer is dense.
        reader = DecoderReader(config, eps=1e-5, defaults={"intermediate_size": 1, "head_dim": 128})
        layer = reader.pre_norm_layer(reader.attention(qkv_bias=reader.flag("attention_bias")), read_experts(reader))
        return reader.model((layer,) * reader.num_layers, (reader.rope(RopeRules(theta=1e6, partial=1.0)),))
    reader = DecoderReader(config, eps=1e-5)
    experts = read_experts(reader)
    num_dense = config.take("first_k_dense_replace", int, 1) or 0
    attention = reader.attention(
        qkv_bias=reader.flag("attention_bias"),
        qk_norm=QkNormSpec(eps=reader.eps) if reader.flag("use_qk_norm") else None,
    )
    layers = tuple(
        reader.pre_norm_layer(attention, reader.mlp() if index < num_dense else experts)
        for index in range(reader.num_layers)
    )
    mtp = reader.next_token_layer(attention, experts)
    return reader.model(layers, (reader.rope(RopeRules(partial=0.5)),), stored_mtp=mtp)


def read_experts(
    reader: DecoderReader, *, factor: float = 1.0, top_k: int = 8, defaults: Mapping[str, int] | None = None
) -> ExpertsSpec:
    """Experts as DeepSeek-V3 has them: ``factor``, ``top_k`` and ``defaults`` are the family's for absent keys."""
    config, defaults = reader.config, defaults or {}
    config.expect("moe_router_dtype", str, "float32")
    config.expect("scoring_func", str, "sigmoid")
    config.expect("topk_method", str, "noaux_tc")
    inner = config.require_positive("moe_intermediate_size")
    num_shared = config.take("n_shared_experts", int, 1) or 0
    shared = MlpSpec(inner_size=num_shared * inner, activation=reader.activation, name="shared_experts")
    return reader.experts(
        reader.take_first("n_routed_experts", "num_local_experts", "num_experts"),
        RoutingRule(
            top_k=config.take_positive("num_experts_per_tok", top_k),
            scores="sigmoid",
            renormalises=reader.flag("norm_topk_prob", True),
            sum_eps=1e-20,
            factor=reader.number("routed_scaling_factor", factor),
            num_groups=config.take_positive("n_group", defaults.get("n_group", 1)),
            top_groups=config.take_positive("topk_group", defaults.get("topk_group", 1)),
        ),
        inner_size=inner,
        routes_in_float32=True,
        correction="gate.e_score_correction_bias",
        shared=shared if num_shared else None,
    )
