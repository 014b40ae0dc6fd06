"""The architectures that the engine runs, and what their config.json files can say.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson


@dataclass(frozen=True, kw_only=True)
class Family:
    """Which options an architecture's config.json has, and what it always is.

    ``None`` for ``qkv_bias`` means that ``attention_bias`` decides, for query, key, value and output projections alike.
    """

    qkv_bias: bool | None = False
    mlp_bias_option: bool = False
    qk_norm: bool = False
    layered_windows: bool = False
    global_window: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias_option=True),
    "MistralForCausalLM": Family(global_window=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True, layered_windows=True),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, layered_windows=True),
}


def read_architecture(reader: ConfigJson) -> str:
    """The one architecture that the checkpoint names.  Raises ``ConfigError`` if the engine does not run it."""
    names = reader.require("architectures", list)
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ConfigError(
            f"config.json: architectures is {names!r}; this engine runs exactly one of {', '.join(FAMILIES)}"
        )
    return str(names[0])


def read_windows(reader: ConfigJson, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """One sliding window per layer: the number of visible keys, self included, or None for all."""
    window, first_windowed = _read_window(reader, family)
    if window is not None and window <= 0:
        raise ConfigError(f"config.json: sliding_window is {window}; it must be positive, or null for none")
    implied = tuple(window if index >= first_windowed else None for index in range(num_layers))
    types = reader.take("layer_types", list)
    return implied if types is None else _windows_of_types(types, window, implied, family.layered_windows)


def _read_window(reader: ConfigJson, family: Family) -> tuple[int | None, int]:
    """The window and the first layer that has it.  The defaults for absent keys are those of transformers."""
    if not (family.global_window or family.layered_windows):
        return None, 0
    default = None if reader.has("sliding_window") else 4096
    window = reader.take("sliding_window", int, default)
    if family.global_window:
        return window, 0
    enabled = reader.take("use_sliding_window", bool, False)
    first_windowed = reader.take("max_window_layers", int, 28)
    return window if enabled else None, first_windowed or 0


def _windows_of_types(
    types: list[Any], window: int | None, implied: tuple[int | None, ...], free: bool
) -> tuple[int | None, ...]:
    """``layer_types`` says per layer whether the window applies; only ``free`` families may depart from ``implied``."""
    known = {"full_attention": None, "sliding_attention": window}
    if len(types) != len(implied) or not all(name in known for name in types):
        raise ConfigError(
            f"config.json: layer_types is {types!r}; it must name full_attention or sliding_attention for each of the "
            f"{len(implied)} layers"
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError("config.json: layer_types asks for sliding_attention, but no sliding window is enabled")
    windows = tuple(known[name] for name in types)
    if not free and windows != implied:
        raise ConfigError(f"config.json: layer_types {types!r} is not supported for this architecture; remove it")
    return windows
