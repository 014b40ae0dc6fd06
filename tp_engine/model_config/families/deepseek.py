"""DeepSeek V2, V3, R1, V3.1, V3.2 and Kimi K2: latent attention, experts in groups, a shared MLP; V3.2 has an
indexer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.glm4_moe import read_experts
from tp_engine.model_config.mla import IndexSpec, MLASpec
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.rope import RopeRules, read_rope
from tp_engine.model_config.spec import AttentionSpec, ModelSpec

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")

_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_KINDS = {"full_attention", "indexed_attention", "deepseek_sparse_attention"}  # all of them dense here
_EXPERTS = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}


def read(config: ConfigJson) -> ModelSpec:
    """V2 chooses by softmax, the others by sigmoids and a correction."""
    reader, latent = latent_reader(config, _LATENT)
    if config.architecture == "DeepseekV2ForCausalLM":
        config.expect("mlp_bias", bool, False)
        experts, num_dense = _read_soft_experts(reader), config.take("first_k_dense_replace", int, 0) or 0
        is_dense = [index < num_dense for index in range(reader.num_layers)]
        return latent_model(reader, latent, experts, is_dense, eos=(2,))
    if config.architecture != "DeepseekV32ForCausalLM":
        return _v3_model(reader, latent)
    # Its pairs are half of the rotation apart, although those of queries and keys are neighbours.
    return _v3_model(reader, latent, indexers=read_indexers(reader, latent, num_heads=64, is_interleaved=False))


def read_v3(config: ConfigJson, **changes: Any) -> ModelSpec:
    """Return DeepSeek-V3, with ``changes`` for ``latent_model``."""
    return _v3_model(*latent_reader(config, _LATENT), **changes)


def _v3_model(reader: DecoderReader, latent: MLASpec, **changes: Any) -> ModelSpec:
    experts = read_experts(reader, factor=2.5, defaults=_EXPERTS)
    return latent_model(
        reader, latent, experts, take_dense_layers(reader, _EXPERTS["first_k_dense_replace"]), **changes
    )


def latent_reader(config: ConfigJson, sizes: Mapping[str, int], *, eps: float = 1e-6) -> tuple[DecoderReader, MLASpec]:
    """Return a reader of a model with latent attention, and its sizes; ``sizes`` are the family's values for absent
    ones."""
    config.expect("attention_bias", bool, False)
    config.expect("moe_layer_freq", int, 1)
    if (kinds := set(config.take_names("layer_types"))) - _KINDS:
        raise config.refusal("layer_types", sorted(kinds), f"it must be of {', '.join(_KINDS)}", "use another model")
    latent = MLASpec(
        rank=config.take_positive("kv_lora_rank", sizes["kv_lora_rank"]),
        nope_dim=config.take_positive("qk_nope_head_dim", sizes["qk_nope_head_dim"]),
        rope_dim=config.take_positive("qk_rope_head_dim", sizes["qk_rope_head_dim"]),
        value_dim=config.take_positive("v_head_dim", sizes["v_head_dim"]),
        query_rank=config.take("q_lora_rank", int, None if config.has("q_lora_rank") else sizes["q_lora_rank"]),
    )
    config.expect("qk_head_dim", int, latent.query_dim)
    return DecoderReader(config, eps=eps, defaults={"head_dim": latent.query_dim}), latent


def latent_model(
    reader: DecoderReader,
    latent: MLASpec,
    experts: ExpertsSpec,
    is_dense: list[bool],
    *,
    turns_share: bool = False,
    indexers: Sequence[IndexSpec] | None = None,
    names: CheckpointNames = USUAL_NAMES,
    tied: bool = False,
    eos: tuple[int, ...] = (1,),
) -> ModelSpec:
    """Layers with latent attention, each ``is_dense`` or with ``experts``.

    With ``turns_share``, config.json counts what turns as a share of a whole head.  ``indexers``: each layer's, if
    there are some; then the layer of a draft head has one of its own.
    """
    config, share = reader.config, latent.rope_dim / latent.query_dim
    rope = read_rope(
        config,
        head_dim=latent.query_dim if turns_share else latent.rope_dim,
        max_position=reader.max_position,
        rules=RopeRules(partial=share if turns_share else None, is_interleaved=reader.flag("rope_interleave", True)),
    )
    if rope.rotary_dim != latent.rope_dim:
        raise ConfigError(
            f"config.json: partial_rotary_factor turns {rope.rotary_dim} elements of a head, but qk_rope_head_dim is "
            f"{latent.rope_dim}; both must be the same number"
        )
    attention = AttentionSpec(
        num_heads=reader.num_heads,
        num_kv_heads=1,
        head_dim=latent.query_dim,
        scale=latent.query_dim**-0.5 * rope.score_factor,
        latent=latent,
    )
    skipped: list[str] = []
    attentions = [attention] * reader.num_layers
    if indexers is not None:  # those that are not read: short contexts need none, and some layers share
        skipped = [f"model.layers.{index}.self_attn.indexer." for index in range(reader.num_layers + 1)]
        attentions = [replace(attention, latent=replace(latent, index=index)) for index in indexers]
        attention = replace(attention, latent=replace(latent, index=replace(indexers[0], source=None)))
    layers = tuple(
        reader.pre_norm_layer(own, reader.mlp() if is_dense[index] else experts) for index, own in enumerate(attentions)
    )
    names = replace(names, skipped=(*names.skipped, *skipped))
    mtp = reader.next_token_layer(attention, experts)
    return reader.model(layers, (rope,), names=names, tied=tied, eos=eos, stored_mtp=mtp)


def read_indexers(
    reader: DecoderReader,
    latent: MLASpec,
    *,
    num_heads: int,
    is_interleaved: bool,
    is_shared: Sequence[bool] | None = None,
) -> list[IndexSpec]:
    """Each layer's indexer, absent keys as in the family; of a layer that ``is_shared``, the last one before it."""
    config = reader.config
    config.expect("indexer_rope_interleave", bool, is_interleaved)
    if latent.query_rank is None:
        rule = "index queries are made of the queries' latents"
        raise config.refusal("q_lora_rank", None, rule, "use a complete checkpoint")
    spec = IndexSpec(
        num_heads=config.take_positive("index_n_heads", num_heads),
        dim=config.take_positive("index_head_dim", 128),
        top_k=config.take_positive("index_topk", 2048),
        is_interleaved=is_interleaved,
    )
    if spec.dim < latent.rope_dim:
        rule = f"qk_rope_head_dim, {latent.rope_dim}, of its elements turn"
        raise config.refusal("index_head_dim", spec.dim, rule, "correct config.json")
    found, last = [], 0
    for index, shares in enumerate(is_shared or [False] * reader.num_layers):
        last = last if shares else index
        found.append(replace(spec, source=last) if shares else spec)
    return found


def take_dense_layers(reader: DecoderReader, default: int) -> list[bool]:
    """Return which layers have no experts: as ``mlp_layer_types`` lists, or the first ``first_k_dense_replace``."""
    config, count = reader.config, reader.num_layers
    num_dense = config.take("first_k_dense_replace", int, default) or 0
    types = config.take("mlp_layer_types", list)
    if types is None:
        return [index < num_dense for index in range(count)]
    if len(types) != count or not all(kind in ("dense", "sparse") for kind in types):
        raise ConfigError(
            f"config.json: mlp_layer_types is {shown(types)}; it must say dense or sparse for each of {count} layers"
        )
    return [kind == "dense" for kind in types]


def _read_soft_experts(reader: DecoderReader) -> ExpertsSpec:
    """DeepSeek-V2's: a group is worth its best expert, and weights are not divided by their sum."""
    config, inner = reader.config, reader.config.require_positive("moe_intermediate_size")
    config.expect("scoring_func", str, "softmax")
    config.expect("norm_topk_prob", bool, False)
    is_limited = config.take_one_of("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    num_groups, top_groups = config.take("n_group", int) or 1, config.take("topk_group", int) or 1
    rule = RoutingRule(
        top_k=config.require_positive("num_experts_per_tok"),
        factor=reader.number("routed_scaling_factor", 1.0),
        num_groups=num_groups if is_limited else 1,
        top_groups=top_groups if is_limited else 1,
        group_best=1,
    )
    shared = inner * config.take_positive("n_shared_experts", 2)
    return reader.experts(
        reader.take_first("n_routed_experts", "num_experts"),
        rule,
        inner_size=inner,
        routes_in_float32=True,
        shared=MlpSpec(inner_size=shared, activation=reader.activation, name="shared_experts"),
    )
