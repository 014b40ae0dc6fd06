"""Qwen3-Next, Qwen3.5 and later (their text parts), dense and with experts: most layers have the gated delta rule, the
others attention whose output is gated."""

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.qwen_moe import take_sparse_layers
from tp_engine.model_config.head_gate import HeadGateSpec
from tp_engine.model_config.mlp import EACH, FUSED, ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.recurrent import GatedDeltaNetSpec
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import LayerSpec, ModelSpec, MtpSpec, QkNormSpec

_NEXT = "Qwen3NextForCausalLM"
_DENSE = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_SPARSE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = (_NEXT, *_DENSE, *_SPARSE)
_NAMES = CheckpointNames(
    spellings=(("model.", "lm_head."), ("model.language_model.", "lm_head.")), skipped=("model.visual.",)
)
_ROPE = RopeRules(partial=0.25)
_MULTIMODAL = RopeRules(partial=0.25, is_multimodal=True, sections=(11, 11, 10), are_sections_mixed=True)
_KINDS = {"linear_attention": False, "full_attention": True}


def read(config: ConfigJson) -> ModelSpec:
    """Norms add 1 to their weights, but for the one after the gated delta rule.  Absent keys are as in
    transformers."""
    architecture = config.architecture
    is_wrapped = architecture.endswith("ForConditionalGeneration")
    config = config.text_part() if is_wrapped else config
    config.take_one_of("output_gate_type", "swish", "silu")  # two names of one function, of the delta rule's output
    config.skip("mlp_only_layers_mtp")
    config.expect("attn_output_gate", bool, True)
    config.expect("mamba_ssm_dtype", str, "float32")
    inner = {} if architecture in _DENSE else {"intermediate_size": 1}  # of dense layers, which there may be none of
    reader = DecoderReader(config, defaults=inner)
    is_sparse = [False] * reader.num_layers
    experts: ExpertsSpec | None = None
    if architecture not in _DENSE:
        experts = _read_experts(reader, architecture == _NEXT)
        is_sparse = take_sparse_layers(reader) if architecture == _NEXT else [True] * reader.num_layers
    bias = reader.flag("attention_bias")
    attention = reader.attention(
        qkv_bias=bias, out_bias=bias, gate=HeadGateSpec(), qk_norm=QkNormSpec(eps=reader.eps, offset=1.0)
    )
    delta = _read_delta(reader, is_fused=architecture == _NEXT)

    def layer(*, attends: bool, is_sparse: bool) -> LayerSpec:
        return LayerSpec(
            attention=attention if attends else delta,
            mlp=experts if experts is not None and is_sparse else reader.mlp(),
            input_norm=reader.norm("input_layernorm", offset=1.0),
            mlp_norm=reader.norm("post_attention_layernorm", offset=1.0),
        )

    kinds = zip(_take_kinds(reader), is_sparse, strict=True)
    layers = tuple(layer(attends=attends, is_sparse=sparse) for attends, sparse in kinds)
    mtp = MtpSpec(
        path="mtp.layers.0",
        layer=layer(attends=True, is_sparse=True),
        projection="mtp.fc",
        embed_norm=reader.norm("mtp.pre_fc_norm_embedding", offset=1.0),
        hidden_norm=reader.norm("mtp.pre_fc_norm_hidden", offset=1.0),
        final_norm=reader.norm("mtp.norm", offset=1.0),
    )
    rope = reader.rope(_ROPE if architecture == _NEXT else _MULTIMODAL)
    return reader.model(layers, (rope,), final_norm=reader.norm("norm", offset=1.0), names=_NAMES, stored_mtp=mtp)


def _take_kinds(reader: DecoderReader) -> list[bool]:
    """Which layers attend: every ``full_attention_interval``-th, or as ``layer_types`` says."""
    interval = reader.config.take_positive("full_attention_interval", 4)
    attends = [(index + 1) % interval == 0 for index in range(reader.num_layers)]
    implied = ["full_attention" if one else "linear_attention" for one in attends]
    return reader.take_attending(_KINDS, implied)


def _read_delta(reader: DecoderReader, *, is_fused: bool) -> GatedDeltaNetSpec:
    config = reader.config
    num_key_heads = config.take_positive("linear_num_key_heads", 16)
    num_value_heads = config.take_positive("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads is {num_value_heads}; it must be a multiple of linear_num_key_heads, "
            f"{num_key_heads}"
        )
    return GatedDeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=config.take_positive("linear_key_head_dim", 128),
        value_dim=config.take_positive("linear_value_head_dim", 128),
        taps=config.take_positive("linear_conv_kernel_dim", 4, least=2),
        eps=reader.eps,
        is_fused=is_fused,
    )


def _read_experts(reader: DecoderReader, is_next: bool) -> ExpertsSpec:
    """Qwen3.5 always renormalises the experts' weights."""
    config = reader.config
    shared = config.take_positive("shared_expert_intermediate_size", 512)
    return reader.experts(
        reader.take_first("num_experts", "num_local_experts"),
        RoutingRule(
            top_k=config.take_positive("num_experts_per_tok", 10 if is_next else 8),
            renormalises=reader.flag("norm_topk_prob", True) or not is_next,
        ),
        inner_size=config.take_positive("moe_intermediate_size", 512),
        shared=MlpSpec(inner_size=shared, activation=reader.activation, name="shared_expert"),
        shared_gate="shared_expert_gate",
        stored=(EACH, FUSED),
    )
