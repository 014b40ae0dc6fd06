"""Rotary embedding settings of a model, in both of the spellings that checkpoints use.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and the scaling rule with its numbers (``default``, ``linear``, ``llama3``)."""

    theta: float = DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


def read_rope(config: ConfigJson, max_position: int) -> RopeConfig:
    """Read ``rope_theta`` and ``rope_scaling`` (classic), or ``rope_parameters`` (transformers 5).

    As in transformers, ``rope_scaling`` goes before ``rope_parameters``, a ``rope_theta`` inside of either goes before
    the one beside it, and an ``original_max_position_embeddings`` beside them before the one inside.
    """
    theta = config.take("rope_theta", float, DEFAULT_THETA)
    config.expect("partial_rotary_factor", float, 1.0)
    scaling = config.take("rope_scaling", dict)
    parameters = config.take("rope_parameters", dict)
    name, chosen = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or {})
    outer_original = config.take("original_max_position_embeddings", int)
    if outer_original is not None:
        chosen = {**chosen, "original_max_position_embeddings": outer_original}
    assert theta is not None
    return _read_scaling(name, chosen, theta, max_position)


def _read_scaling(name: str, values: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    config = ConfigJson(values, f"config.json: {name}")
    old_kind = config.take("type", str, "default")
    kind = config.take("rope_type", str, old_kind)
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"config.json: {name} asks for rope type {kind!r}; this engine supports {', '.join(ROPE_KINDS)}"
        )
    config.expect("partial_rotary_factor", float, 1.0)
    own_theta = config.take("rope_theta", float, theta)
    assert own_theta is not None
    original_max_position = config.take_positive("original_max_position_embeddings", max_position)
    numbers: dict[str, Any] = {}
    if kind != "default":
        numbers["factor"] = config.require("factor", float)
    if kind == "llama3":
        numbers["low_freq_factor"] = config.require("low_freq_factor", float)
        numbers["high_freq_factor"] = config.require("high_freq_factor", float)
        numbers["original_max_position"] = original_max_position
    config.finish(frozenset())
    rope = RopeConfig(theta=own_theta, kind=kind, **numbers)
    _check_numbers(name, rope)
    return rope


def _check_numbers(name: str, rope: RopeConfig) -> None:
    if rope.theta <= 0 or rope.factor <= 0:
        raise ConfigError(
            f"config.json: rope theta is {rope.theta} and factor {rope.factor}; both must be above 0 (see {name})"
        )
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise ConfigError(
            f"config.json: {name} has low_freq_factor {rope.low_freq_factor} and high_freq_factor "
            f"{rope.high_freq_factor}; the first must be above 0 and below the second"
        )
