"""SmolLM3: Llama in which every fourth layer does not turn queries and keys."""

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def read(config: ConfigJson) -> ModelSpec:
    """``no_rope_layers`` has a 1 for each layer that turns."""
    reader = DecoderReader(config)
    config.skip("max_window_layers")  # a key of the released files that has no effect
    bias, interval = reader.flag("attention_bias"), config.take_positive("no_rope_layer_interval", 4)
    turns = config.take("no_rope_layers", list)
    if turns is None:
        turns = [int((index + 1) % interval != 0) for index in range(reader.num_layers)]
    if len(turns) < reader.num_layers or any(turn not in (0, 1) for turn in turns):
        raise ConfigError(f"config.json: no_rope_layers is {shown(turns)}; it must have a 0 or a 1 for each layer")
    window = reader.take_window()
    enabled = window if reader.flag("use_sliding_window") else None
    windows = reader.windows(enabled, lambda index: not turns[index])
    mlp = reader.mlp(bias=reader.flag("mlp_bias"))
    layers = tuple(
        reader.pre_norm_layer(reader.attention(window=one, rope=0 if turn else None, qkv_bias=bias, out_bias=bias), mlp)
        for one, turn in zip(windows, turns, strict=False)
    )
    return reader.model(layers, (reader.rope(RopeRules(theta=2_000_000.0)),), tied=True, eos=(128001,))
