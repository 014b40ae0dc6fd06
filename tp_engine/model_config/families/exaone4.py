"""EXAONE 4 and the text part of 4.5: norms on the blocks' outputs, normalised heads; in hybrid models, layers without a
window do not turn."""

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.spec import ModelSpec, QkNormSpec

_WRAPPER = "Exaone4_5_ForConditionalGeneration"
ARCHITECTURES = ("Exaone4ForCausalLM", _WRAPPER)
_NAMES = CheckpointNames(
    spellings=(("model.language_model.", "lm_head."), ("model.", "lm_head.")), skipped=("model.visual.", "visual.")
)


def read(config: ConfigJson) -> ModelSpec:
    """Without ``sliding_window``, all layers see all keys and turn."""
    is_wrapped = config.architecture == _WRAPPER
    config = config.text_part("exaone4", "exaone4_5_text") if is_wrapped else config
    reader = DecoderReader(config, eps=1e-5)
    window, pattern = reader.take_window(4096), _read_pattern(config)
    windows = reader.windows(window, lambda index: window is not None and (index + 1) % pattern != 0)
    qk_norm = QkNormSpec(eps=reader.eps)
    layers = tuple(
        reader.post_norm_layer(
            reader.attention(window=one, rope=None if window is not None and one is None else 0, qk_norm=qk_norm),
            reader.mlp(),
        )
        for one in windows
    )
    return reader.model(layers, (reader.rope(),), names=_NAMES if is_wrapped else USUAL_NAMES, eos=(2,))


def _read_pattern(config: ConfigJson) -> int:
    """The period of layers without a window: a number, or a string such as ``LLLG``."""
    pattern = config.peek("sliding_window_pattern")
    config.skip("sliding_window_pattern")
    if pattern is None or pattern == 0:
        return 4
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    if isinstance(pattern, int) and pattern > 0:
        return pattern
    raise ConfigError(
        f"config.json: sliding_window_pattern is {shown(pattern)}; it must be a number, or L's that end with a G"
    )
