"""Nemotron-H, Nemotron 3 and 3.5: layers of one block, which is a state space layer (Mamba2), attention without a
rotation, an MLP without a gate, or experts of such, in Nemotron 3 Super and Ultra between latents."""

import math
from collections.abc import Mapping

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.mlp import EACH, ActivationKind, ExpertLatentSpec, ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.recurrent import Mamba2Spec
from tp_engine.model_config.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("NemotronHForCausalLM",)
_NAMES = CheckpointNames(
    spellings=(("backbone.", "lm_head."), ("model.", "lm_head.")),
    renamed=(("embed_tokens", "embeddings"), ("self_attn", "mixer")),
)
_ACTIVATIONS: Mapping[str, ActivationKind] = {"relu2": "relu2"}
# The letters of hybrid_override_pattern, and the names of both versions of the lists.
_KINDS = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe",
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention",
    "mlp": "mlp", "moe": "moe",
}  # fmt: skip
_UNBOUNDED = [0.0, math.inf]
# In the words of other writers of JSON; transformers' is the last.
_INFINITIES = (["Infinity"], ["inf"], [{"__float__": "Infinity"}])


def read(config: ConfigJson) -> ModelSpec:
    """Absent keys are as in transformers.

    ``time_step_min`` and the like are for the start of training: transformers bounds steps by the first, in prompts
    alone, which no other engine does, nor its own decode.
    """
    kinds = _take_kinds(config)
    reader = DecoderReader(
        config,
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation_key="mlp_hidden_act",
        activation="relu2",
        activations=_ACTIVATIONS,
        defaults={
            "num_hidden_layers": len(kinds),
            "num_key_value_heads": 8,
            "head_dim": config.take_positive("attention_head_dim", 128),
            "intermediate_size": 21504,
        },
    )
    if reader.num_layers != len(kinds):
        raise ConfigError(
            f"config.json: num_hidden_layers is {reader.num_layers}, and {len(kinds)} layers are named "
            "(hybrid_override_pattern, layers_block_type); they must agree"
        )
    for other in ("norm_eps", "rms_norm_eps"):
        config.expect(other, float, reader.eps)
    for flag in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        config.expect(flag, bool, False)
    config.expect("mamba_hidden_act", str, "silu")
    # Attention does not turn, whatever these say.
    config.skip("rope_theta", "partial_rotary_factor", "rope_scaling")
    config.skip("num_logits_to_keep", "use_mamba_kernels", "rescale_prenorm_residual", "expand", "chunk_size")
    config.skip("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "mamba_ssm_cache_dtype")
    config.skip("moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    check_time_steps(config)

    mamba, experts = _read_mamba(reader), _read_experts(reader)
    norm, mlp = reader.norm("norm"), reader.mlp(name="mixer")

    layers = {
        "mamba": LayerSpec(attention=mamba, mlp=None, input_norm=norm),
        "attention": LayerSpec(attention=reader.attention(rope=None), mlp=None, input_norm=norm),
        "mlp": LayerSpec(attention=None, mlp=mlp, input_norm=norm),
        "moe": LayerSpec(attention=None, mlp=experts, input_norm=norm),
    }
    return reader.model(
        tuple(layers[kind] for kind in kinds), (), eos=(2,), final_norm=reader.norm("norm_f"), names=_NAMES
    )


def _take_kinds(config: ConfigJson) -> list[str]:
    """What each layer is, by the pattern or a list; all that there are must agree."""
    found: list[list[str]] = []
    for key in ("hybrid_override_pattern", "layers_block_type", "layer_types"):
        names = list(config.take(key, str) or "") if key == "hybrid_override_pattern" else config.take(key, list)
        if not names:
            continue
        if not all(isinstance(name, str) and name in _KINDS for name in names):
            raise ConfigError(
                f"config.json: {key} is {shown(config.peek(key))}; it must say of each layer that it is mamba (M), "
                "attention (*), mlp (-) or moe (E)"
            )
        found.append([_KINDS[name] for name in names])
    if not found or any(one != found[0] for one in found):
        raise ConfigError(
            "config.json: hybrid_override_pattern, layers_block_type and layer_types say what each layer is: "
            "there must be one of them, and they must agree"
        )
    return found[0]


def check_time_steps(config: ConfigJson) -> None:
    """Refuse bounds of the steps; infinity is spelled in several ways."""
    limit = config.take("time_step_limit", list) or _UNBOUNDED
    is_free = limit[1:] in _INFINITIES or all(isinstance(one, float) and one >= 1e30 for one in limit[1:])
    if len(limit) != 2 or limit[0] != 0 or not is_free:
        raise config.refusal(
            "time_step_limit", limit, "steps are not bounded here: it must be 0 and infinity", "use another model"
        )


def _read_mamba(reader: DecoderReader) -> Mamba2Spec:
    config = reader.config
    mamba = Mamba2Spec(
        num_groups=config.take_positive("n_groups", 8),
        num_heads=config.take_positive("mamba_num_heads", 128),
        state_size=config.take_positive("ssm_state_size", 128),
        head_dim=config.take_positive("mamba_head_dim", 64),
        taps=config.take_positive("conv_kernel", 4, least=2),
        eps=reader.eps,
        has_conv_bias=reader.flag("use_conv_bias", True),
        name="mixer",
    )
    check_mamba(mamba, heads="mamba_num_heads", groups="n_groups")
    return mamba


def check_mamba(mamba: Mamba2Spec, *, heads: str, groups: str) -> None:
    """Raise ``ConfigError`` for sizes that do not fit, with the names of their keys."""
    if mamba.num_heads % mamba.num_groups:
        raise ConfigError(
            f"config.json: {heads} is {mamba.num_heads}; it must be a multiple of {groups}, {mamba.num_groups}"
        )


def _read_experts(reader: DecoderReader) -> ExpertsSpec:
    """Routed as in DeepSeek-V3."""
    config = reader.config
    config.expect("n_shared_experts", int, 1)
    shared = config.take_positive("moe_shared_expert_intermediate_size", 7688)
    latent = config.take("moe_latent_size", int)
    return reader.experts(
        reader.take_first("n_routed_experts", "num_local_experts", default=8),
        RoutingRule(
            top_k=config.take_positive("num_experts_per_tok", 2),
            scores="sigmoid",
            renormalises=reader.flag("norm_topk_prob", True),
            sum_eps=1e-20,
            factor=reader.number("routed_scaling_factor", 1.0),
            num_groups=config.take_positive("n_group", 1),
            top_groups=config.take_positive("topk_group", 1),
        ),
        inner_size=config.take_positive("moe_intermediate_size", 7688),
        routes_in_float32=True,
        correction="gate.e_score_correction_bias",
        shared=MlpSpec(inner_size=shared, activation=reader.activation, name="shared_experts"),
        latent=None if latent is None else ExpertLatentSpec(size=latent, down="fc1_latent_proj", up="fc2_latent_proj"),
        stored=(EACH,),
        name="mixer",
    )
