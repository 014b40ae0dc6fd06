"""Granite 4: state space layers (Mamba2), and attention with or without a rotation, before an MLP, or before experts
beside a shared MLP; with Granite's multipliers."""

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.granite import read_attention, read_experts, read_multipliers
from tp_engine.model_config.families.nemotron_h import check_mamba, check_time_steps
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.recurrent import Mamba2Spec
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
_NAMES = CheckpointNames(renamed=(("shared_mlp.down_proj", "shared_mlp.output_linear"),))
_KINDS = {"mamba": False, "attention": True, "linear_attention": False, "full_attention": True}


def read(config: ConfigJson) -> ModelSpec:
    """Logits are divided by ``logits_scaling``.  Without experts, ``intermediate_size`` says nothing."""
    reader = DecoderReader(config, defaults={"intermediate_size": 11008})
    check_time_steps(config)
    config.expect("normalization_function", str, "rmsnorm")
    config.expect("mamba_proj_bias", bool, False)
    config.skip("mamba_chunk_size", "init_method")
    kind = config.take_one_of("position_embedding_type", "nope", "rope")
    rope = reader.rope()
    attention = read_attention(reader, rope=0 if kind == "rope" else None)
    mamba, mlp = _read_mamba(reader), _read_mlp(reader)
    scale = reader.number("residual_multiplier", 1.0)
    return reader.model(
        tuple(
            reader.pre_norm_layer(attention if attends else mamba, mlp, residual_scale=scale)
            for attends in reader.take_attending(_KINDS, ["mamba"] * reader.num_layers, may_be_none=True)
        ),
        (rope,) if kind == "rope" else (),
        eos=(2,),
        names=_NAMES,
        **read_multipliers(reader),
    )


def _read_mamba(reader: DecoderReader) -> Mamba2Spec:
    config = reader.config
    num_heads, size = config.take_positive("mamba_n_heads", 128), config.take_positive("mamba_expand", 2)
    size *= reader.hidden_size
    if config.peek("mamba_d_head") == "auto":
        config.skip("mamba_d_head")
    head_dim = size // num_heads if config.peek("mamba_d_head") in (None, "auto") else 0
    head_dim = head_dim or config.take_positive("mamba_d_head", 64)
    if num_heads * head_dim != size:
        raise ConfigError(
            f"config.json: mamba_n_heads is {num_heads} and mamba_d_head is {head_dim}; their product must be "
            f"mamba_expand times hidden_size, {size}"
        )
    mamba = Mamba2Spec(
        num_groups=config.take_positive("mamba_n_groups", 1),
        num_heads=num_heads,
        state_size=config.take_positive("mamba_d_state", 256),
        head_dim=head_dim,
        taps=config.take_positive("mamba_d_conv", 4, least=2),
        eps=reader.eps,
        has_conv_bias=reader.flag("mamba_conv_bias", True),
    )
    check_mamba(mamba, heads="mamba_n_heads", groups="mamba_n_groups")
    return mamba


def _read_mlp(reader: DecoderReader) -> MlpSpec | ExpertsSpec:
    """The experts' tensors are below a module of their own, beside the shared MLP."""
    config = reader.config
    shared = MlpSpec(
        inner_size=config.take_positive("shared_intermediate_size", 1024),
        activation=reader.activation,
        fused_name="input_linear",
        name="shared_mlp",
    )
    if not config.take("num_local_experts", int, 8):
        config.skip("num_experts_per_tok")
        return shared
    return read_experts(reader, "", below="block_sparse_moe.", shared=shared)
