"""Solar Open: GLM-4.5's experts in every layer, Llama's attention."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.glm4_moe import read_experts
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("SolarOpenForCausalLM",)
_DEFAULTS = {"intermediate_size": 1, "head_dim": 128}  # no layer is dense


def read(config: ConfigJson) -> ModelSpec:
    """Heads are not normalised; all of a head turns unless ``partial_rotary_factor`` says less."""
    reader = DecoderReader(config, eps=1e-5, defaults=_DEFAULTS)
    config.expect("use_qk_norm", bool, False)
    config.expect("first_k_dense_replace", int, 0)
    layer = reader.pre_norm_layer(reader.attention(qkv_bias=reader.flag("attention_bias")), read_experts(reader))
    return reader.model((layer,) * reader.num_layers, (reader.rope(RopeRules(theta=1e6, partial=1.0)),))
