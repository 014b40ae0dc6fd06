"""ERNIE 4.5 MoE: experts by softmax with a bias for the choice, a shared MLP, pairs interleaved; first layers dense."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import MlpSpec, RoutingRule
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec, MtpSpec

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """Experts from ``moe_layer_start_index`` to ``moe_layer_end_index``, in every ``moe_layer_interval``-th layer."""
    reader = DecoderReader(config, eps=1e-5)
    config.expect("use_bias", bool, False)
    config.expect("use_rmsnorm", bool, True)
    inner = config.require_positive("moe_intermediate_size")
    num_shared = config.take("moe_num_shared_experts", int, 2) or 0
    shared = MlpSpec(inner_size=num_shared * inner, activation=reader.activation, name="shared_experts")
    experts = reader.experts(
        reader.take_first("moe_num_experts", "num_experts"),
        RoutingRule(
            top_k=reader.take_first("moe_k", "num_experts_per_tok"),
            renormalises=True,
        ),
        inner_size=inner,
        routes_in_float32=True,
        correction="moe_statics.e_score_correction_bias",
        correction_rows=1,
        shared=shared if num_shared else None,
    )
    first, step = config.take("moe_layer_start_index", int, 1) or 0, config.take_positive("moe_layer_interval", 1)
    last = config.take("moe_layer_end_index", int, -1)
    end = reader.num_layers if last is None or last < 0 else last + 1
    config.skip("moe_capacity")
    if not (gate := config.take("moe_gate", str, "topk") or "").startswith("topk"):  # topk_fused is the same
        raise config.refusal("moe_gate", gate, "experts are chosen by their scores", "use another model")
    config.expect("moe_use_aux_free", bool, True)
    if (least := reader.number("moe_norm_min", 1e-12)) > 1e-9:  # the best of any softmax are more than that together
        raise config.refusal("moe_norm_min", least, "it must be at most 1e-9, to bound no sum", "use another model")
    layers = tuple(
        reader.pre_norm_layer(
            reader.attention(), experts if first <= index < end and (index + 1) % step == 0 else reader.mlp()
        )
        for index in range(reader.num_layers)
    )
    rope = reader.rope(RopeRules(theta=5e5, is_interleaved=True))
    mtp = MtpSpec(
        path="model.mtp_block.0",
        layer=reader.pre_norm_layer(reader.attention(), reader.mlp()),
        projection="model.mtp_linear_proj.0",
        embed_norm=reader.norm("model.mtp_emb_norm.0"),
        hidden_norm=reader.norm("model.mtp_hidden_norm.0"),
        final_norm=None,
    )
    return reader.model(layers, (rope,), tied=True, eos=(2,), stored_mtp=mtp)
