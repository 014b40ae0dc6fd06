"""OLMo 2 and OLMo 3: norms on the blocks' outputs only, queries and keys normalised over all heads together."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules, RopeSpec, parse_rope, take_ropes
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
_THETA = 500_000.0  # OLMo 3's


def read(config: ConfigJson) -> ModelSpec:
    """OLMo 3: of every four layers, three have a window; only the rotation of the fourth is scaled."""
    reader = DecoderReader(config, eps=1e-5)
    has_windows = config.architecture == "Olmo3ForCausalLM"
    window = reader.take_window(4096) if has_windows else None
    windows = reader.windows(window, lambda index: (index + 1) % 4 != 0, is_free=has_windows)
    ropes = _read_ropes(reader) if has_windows else (reader.rope(),)
    bias, qk_norm = reader.flag("attention_bias"), QkNormSpec(eps=reader.eps, spans_heads=True)
    layers = tuple(
        reader.post_norm_layer(
            reader.attention(window=one, rope=0 if one is None else 1, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias),
            reader.mlp(),
        )
        for one in windows
    )
    return reader.model(layers, ropes, eos=(50279,))


def _read_ropes(reader: DecoderReader) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of the layers without a window, and of those with one."""
    sizes = {"head_dim": reader.head_dim, "max_position": reader.max_position}
    rules = RopeRules(theta=reader.number("rope_theta", _THETA))
    full, windowed = take_ropes(reader.config)
    return parse_rope(full, rules=rules, **sizes), parse_rope(windowed, rules=rules, **sizes)
