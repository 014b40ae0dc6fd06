"""Kimi Linear: Kimi delta attention in most layers, latent attention that does not turn in the others, and Kimi K2's
experts."""

from dataclasses import replace

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families.deepseek import latent_reader, take_dense_layers
from tp_engine.model_config.families.glm4_moe import read_experts
from tp_engine.model_config.mlp import NUMBERED
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.recurrent import KimiDeltaSpec
from tp_engine.model_config.spec import AttentionSpec, ModelSpec

ARCHITECTURES = ("KimiLinearForCausalLM",)
# The family's names of usual keys, and their types.
_SPELLINGS: dict[str, tuple[str, type[int]]] = {
    "model_max_length": ("max_position_embeddings", int),
    "moe_renormalize": ("norm_topk_prob", bool),
    "num_expert_group": ("n_group", int),
    "num_experts_per_token": ("num_experts_per_tok", int),
    "num_shared_experts": ("n_shared_experts", int),
}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# Files call experts so; transformers, as it saves, dense layers too.
_NAMES = CheckpointNames(renamed=(("mlp", "block_sparse_moe"),))
_DELTA, _FULL = "linear_attention", "full_attention"


def read(config: ConfigJson) -> ModelSpec:
    """Layers in ``linear_attn_config`` are counted from 1."""
    config.expect("mla_use_nope", bool, True)
    config.expect("moe_router_activation_func", str, "sigmoid")
    usual = {ours: config.take(own, kind) for own, (ours, kind) in _SPELLINGS.items() if config.has(own)}
    replaced = (*_SPELLINGS, "moe_router_activation_func", "layer_types", "linear_attn_config", "head_dim")
    changes = {**dict.fromkeys(replaced), **usual}
    sizes, kinds = _delta_sizes(config), config.peek("layer_types")
    inner = config.changed(changes)
    if not config.has("q_lora_rank"):
        inner = inner.changed({"q_lora_rank": None})
    inner.expect("use_grouped_topk", bool, True)
    inner.skip("mla_use_nope", "rope_theta", "rope_scaling")
    inner.skip("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    reader, latent = latent_reader(inner, {**_LATENT, "q_lora_rank": 0}, eps=1e-5)
    num_heads, head_dim, taps = sizes
    delta = KimiDeltaSpec(num_heads=num_heads, head_dim=head_dim, taps=taps, eps=reader.eps)
    attention = AttentionSpec(
        num_heads=reader.num_heads,
        num_kv_heads=1,
        head_dim=latent.query_dim,
        scale=latent.query_dim**-0.5,
        latent=latent,
        rope=None,
    )
    experts = replace(read_experts(reader, factor=2.446), stored=(NUMBERED,))
    attends = _attending(config, kinds, reader.num_layers)
    layers = tuple(
        reader.pre_norm_layer(attention if is_full else delta, reader.mlp() if is_dense else experts)
        for is_full, is_dense in zip(attends, take_dense_layers(reader, 1), strict=True)
    )
    return reader.model(layers, (), eos=(163_586,), names=_NAMES)


def _delta_sizes(config: ConfigJson) -> tuple[int, int, int]:
    """Heads, their size, and taps: of ``linear_attn_config``, or of transformers' keys beside it."""
    own = config.below(config.peek("linear_attn_config") or {}, "linear_attn_config")
    names = (("num_heads", "linear_num_heads", 32), ("head_dim", "linear_head_dim", 128))
    heads, dim = (own.take_positive(name, config.take_positive(outer, usual)) for name, outer, usual in names)
    outer_taps = config.take_positive("linear_conv_kernel_dim", 4, least=2)
    taps = own.take_positive("short_conv_kernel_size", outer_taps, least=2)
    own.skip("kda_layers", "full_attn_layers")
    own.finish_strictly()
    return heads, dim, taps


def _attending(config: ConfigJson, kinds: object, count: int) -> list[bool]:
    """Which layers have latent attention."""
    own = config.peek("linear_attn_config") or {}
    full, delta = own.get("full_attn_layers"), own.get("kda_layers")
    if isinstance(kinds, list):
        if len(kinds) != count or any(kind not in (_DELTA, _FULL) for kind in kinds) or _FULL not in kinds:
            raise config.refusal(
                "layer_types", kinds, f"it must name {_DELTA} or {_FULL} for each of the {count} layers", "correct it"
            )
        return [kind == _FULL for kind in kinds]
    if full is None and delta is None:
        return [index % 4 == 0 and index > 0 for index in range(count)]
    if not full or not isinstance(full, list) or not isinstance(delta, list):
        raise config.refusal("linear_attn_config", own, "it must list full_attn_layers and kda_layers", "correct it")
    if sorted([*full, *delta], key=repr) != sorted(range(1, count + 1), key=repr):
        raise ConfigError(
            f"{config.origin}: linear_attn_config has the layers {shown(full)} and {shown(delta)}; both together must "
            f"be 1 to {count}, each once"
        )
    return [index + 1 in full for index in range(count)]
