"""Mistral Small 4: latent attention whose queries grow with their position, experts by softmax."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families.deepseek import latent_model, latent_reader
from tp_engine.model_config.mlp import EACH, FUSED, MlpSpec, RoutingRule
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.rope import require_rope
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("Mistral4ForCausalLM",)

_LATENT = {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128}


def read(config: ConfigJson, names: CheckpointNames = USUAL_NAMES) -> ModelSpec:
    """Check the share of a head that turns, which follows from the sizes."""
    reader, latent = latent_reader(config, _LATENT)
    require_rope(config)
    inner = config.require_positive("moe_intermediate_size")
    rule = RoutingRule(
        top_k=config.take_positive("num_experts_per_tok", 4),
        renormalises=reader.flag("norm_topk_prob", True),
        sum_eps=1e-20,
        factor=reader.number("routed_scaling_factor", 1.0),
        num_groups=config.take_positive("n_group", 1),
        top_groups=config.take_positive("topk_group", 1),
    )
    shared = inner * config.take_positive("n_shared_experts", 1)
    experts = reader.experts(
        reader.take_first("n_routed_experts", "num_local_experts"),
        rule,
        inner_size=inner,
        shared=MlpSpec(inner_size=shared, activation=reader.activation, name="shared_experts"),
        stored=(FUSED, EACH),
    )
    num_dense = config.take("first_k_dense_replace", int, 0) or 0
    is_dense = [index < num_dense for index in range(reader.num_layers)]
    return latent_model(reader, latent, experts, is_dense, turns_share=True, names=names, eos=(2,))
