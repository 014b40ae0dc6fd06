"""Cohere2 (Command R7B, Command A): attention and MLP side by side after one layer norm, pairs interleaved."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Cohere2ForCausalLM",)
# Values that all released files have.
_FIXED = {
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}


def read(config: ConfigJson) -> ModelSpec:
    """Layers without a window do not turn queries and keys; logits are multiplied by ``logit_scale``."""
    reader = DecoderReader(config, eps_key="layer_norm_eps", eps=1e-5)
    for key, value in _FIXED.items():
        config.expect(key, bool, value)
    config.expect("rotary_pct", float, 1.0)
    config.expect("position_embedding_type", str, "rope_gptj")
    config.expect("order_of_interleaved_layers", str, "local_attn_first")
    bias, pattern = reader.flag("attention_bias"), config.take_positive("sliding_window_pattern", 4)
    for key in ("layer_switch", "_sliding_window_pattern"):
        config.expect(key, int, pattern)
    layers = tuple(
        LayerSpec(
            attention=reader.attention(window=window, rope=None if window is None else 0, qkv_bias=bias, out_bias=bias),
            mlp=reader.mlp(),
            input_norm=reader.norm("input_layernorm", kind="layer"),
            is_parallel=True,
        )
        for window in reader.windows(reader.take_window(4096), lambda index: (index + 1) % pattern != 0)
    )
    return reader.model(
        layers,
        (reader.rope(RopeRules(is_interleaved=True)),),
        tied=True,
        eos=(255001,),
        final_norm=reader.norm("norm", kind="layer"),
        logit_scale=reader.number("logit_scale", 0.0625),
    )
