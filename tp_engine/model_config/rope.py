"""Rotary embedding settings of a model, in both spellings that checkpoints use.  No torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "given"]
DEFAULT_THETA = 10000.0
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How the first ``rotary_dim`` elements of a head turn, with base ``theta``.

    ``kind`` is the rule by which frequencies are scaled, with its numbers; ``layers/rotary.py`` has the formulas.  Of
    kind ``given``, ``frequencies`` are the radians per position of each pair, whatever ``theta`` is.
    ``attention_factor`` multiplies cosines and sines.  ``is_interleaved``: the elements of a pair are neighbours in the
    checkpoint, instead of half of ``rotary_dim`` apart.  With ``query_beta`` b, a query at position p is multiplied by
    ``1 + b log(1 + floor(p / original_max_position))`` (Llama 4, Ministral 3).  ``score_factor`` multiplies the scores
    of latent attention.  ``extends_to``: the positions that YaRN makes of the original ones; 0 if they are not given.
    Where images turn by time, row and column, ``sections`` are the numbers of pairs that turn by each, in this order,
    or in turns (``are_sections_mixed``).
    """

    rotary_dim: int
    theta: float = DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotated_share: float = 1.0
    frequencies: tuple[float, ...] = ()
    attention_factor: float = 1.0
    is_interleaved: bool = False
    query_beta: float = 0.0
    score_factor: float = 1.0
    extends_to: int = 0
    sections: tuple[int, ...] = ()
    are_sections_mixed: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """By which position each pair of a token of an image turns: 0 time, 1 row, 2 column."""
        if not self.are_sections_mixed:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        return tuple(
            index % 3 if index % 3 and index < 3 * self.sections[index % 3] else 0 for index in range(self.num_pairs)
        )

    @property
    def num_pairs(self) -> int:
        """Pairs of elements that turn; of a proportional rotation the first ones, the others have frequency 0."""
        share = self.rotated_share if self.kind == "proportional" else 1.0
        return int(share * self.rotary_dim // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """A family's rules for its rotations.

    ``theta`` is the default base and ``partial`` the default share of a head that turns (None: always all of it).
    ``is_interleaved``: the elements of a pair are neighbours.  ``is_multimodal``: the keys describe three positions per
    token (``mrope``), which are equal for text; ``sections`` is the default for them (``RopeSpec``), and each family
    mixes them in one way; without a default the checkpoint says both.
    """

    theta: float = DEFAULT_THETA
    partial: float | None = None
    is_interleaved: bool = False
    is_multimodal: bool = False
    sections: tuple[int, ...] = ()
    are_sections_mixed: bool = False


PLAIN = RopeRules()


class _Reading(NamedTuple):
    """One rotation's object while it is read; ``original`` positions were trained, of ``rotary_dim`` elements."""

    config: ConfigJson
    original: int
    max_position: int
    rotary_dim: int

    def positive(self, key: str) -> float:
        """Return a required factor, above 0."""
        value = self.config.require(key, float)
        if value <= 0:
            raise ConfigError(f"{self.config.origin} has {key} {value}; it must be above 0")
        return value


def read_rope(config: ConfigJson, *, head_dim: int, max_position: int, rules: RopeRules = PLAIN) -> RopeSpec:
    """Read ``rope_theta`` and ``rope_scaling`` (classic), or ``rope_parameters`` (transformers 5).

    As in transformers, ``rope_scaling`` has precedence over ``rope_parameters``, a ``rope_theta`` inside of either
    over the one beside it, and an ``original_max_position_embeddings`` beside them over the one inside.
    """
    chosen = take_rope(config)
    theta = config.take("rope_theta", float, None if chosen.has("rope_theta") else rules.theta)
    outer_original = config.take("original_max_position_embeddings", int)
    if outer_original is not None:
        chosen = chosen.changed({"original_max_position_embeddings": outer_original})
    partial = rules.partial
    if partial is None:
        config.expect("partial_rotary_factor", float, 1.0)
    else:
        own_partial = config.take("partial_rotary_factor", float)  # null, as transformers reads it, is the default
        partial = partial if own_partial is None else own_partial
    own = replace(rules, theta=rules.theta if theta is None else theta, partial=partial)
    return parse_rope(chosen, head_dim=head_dim, max_position=max_position, rules=own)


def take_rope(config: ConfigJson) -> ConfigJson:
    """Return the object that describes the rotation; an empty one if there is none."""
    scaling, parameters = config.take_object("rope_scaling"), config.take_object("rope_parameters")
    return scaling or parameters or config.below({}, "rope_parameters")


def require_rope(config: ConfigJson) -> None:
    """Raise ``ConfigError`` without an object that describes the rotation: the family's default is YaRN."""
    if not (config.peek("rope_scaling") or config.peek("rope_parameters")):
        config.require("rope_parameters", dict)


def take_ropes(config: ConfigJson) -> tuple[ConfigJson, ConfigJson]:
    """Return the rotations of layers without a window, and of layers with one: ``rope_parameters`` has both, by kind of
    layer; ``rope_scaling`` is of the first alone."""
    scaling, parameters = config.take_object("rope_scaling"), config.take_object("rope_parameters")
    by_kind = parameters or config.below({}, "rope_parameters")
    full, windowed = (by_kind.take_object(kind) or by_kind.below({}, kind) for kind in LAYER_TYPES)
    by_kind.finish_strictly()
    return scaling or full, windowed


def parse_rope(config: ConfigJson, *, head_dim: int, max_position: int, rules: RopeRules = PLAIN) -> RopeSpec:
    """Return one rotation's object.  Raises ``ConfigError`` for what is wrong or not supported."""
    kind = _read_kind(config, rules)
    theta = config.take("rope_theta", float, rules.theta)
    partial = _read_partial(config, rules)
    original = config.take_positive("original_max_position_embeddings", max_position)
    if theta is None or theta <= 0:
        raise ConfigError(f"{config.origin} has theta {theta}; it must be above 0")
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if rotary_dim % 2:
        raise ConfigError(
            f"{config.origin}: {rotary_dim} of the head_dim of {head_dim} elements turn; rotary embeddings need an "
            "even number"
        )
    numbers = _NUMBERS[kind](_Reading(config, original, max_position, rotary_dim))
    if rules.is_multimodal:
        numbers |= _read_sections(config, rules)
    if kind == "proportional":
        numbers["rotated_share"] = partial
    config.finish_strictly()
    return RopeSpec(rotary_dim=rotary_dim, theta=theta, kind=kind, is_interleaved=rules.is_interleaved, **numbers)


def _read_kind(config: ConfigJson, rules: RopeRules) -> RopeKind:
    old_kind = config.take("type", str, "default")
    asked = config.take("rope_type", str, old_kind)
    if rules.is_multimodal:
        asked = "default" if asked == "mrope" else asked
    asked = "longrope" if asked == "su" else asked
    if asked == "dynamic":  # scales only beyond max_position_embeddings, up to which the model is served
        config.require("factor", float)
        return "default"
    for kind in _NUMBERS:
        if asked == kind:
            return kind
    raise ConfigError(f"{config.origin} asks for rope type {shown(asked)}; this engine supports {', '.join(_NUMBERS)}")


def _read_sections(config: ConfigJson, rules: RopeRules) -> dict[str, Any]:
    found = config.take("mrope_section", list, list(rules.sections)) or []
    if len(found) != 3 * bool(found or rules.sections) or not all(type(one) is int and one >= 0 for one in found):
        raise ConfigError(f"{config.origin} has mrope_section {shown(found)}; it must be three numbers of pairs")
    are_mixed = config.take("mrope_interleaved", bool, False)
    return {
        "sections": tuple(found),
        "are_sections_mixed": rules.are_sections_mixed if rules.sections else bool(found and are_mixed),
    }


def _read_partial(config: ConfigJson, rules: RopeRules) -> float:
    """The share of a head that turns."""
    if rules.partial is None:
        config.expect("partial_rotary_factor", float, 1.0)
        return 1.0
    partial = config.take("partial_rotary_factor", float, rules.partial)
    if partial is None or not 0 < partial <= 1:
        raise ConfigError(f"{config.origin} has partial_rotary_factor {partial}; it must be above 0 and at most 1")
    return partial


def _read_llama3(reading: _Reading) -> dict[str, Any]:
    low, high = (reading.config.require(f"{end}_freq_factor", float) for end in ("low", "high"))
    if not 0 < low < high:
        raise ConfigError(
            f"{reading.config.origin} has low_freq_factor {low} and high_freq_factor {high}; the first must be "
            "above 0 and below the second"
        )
    return {
        "factor": reading.positive("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": reading.original,
    }


def _read_yarn(reading: _Reading) -> dict[str, Any]:
    """YaRN (https://arxiv.org/abs/2309.00071), with the keys and defaults of transformers."""
    config = reading.config
    factor = config.take("factor", float)
    factor = reading.max_position / reading.original if factor is None else reading.positive("factor")
    mscale, all_dim = config.take("mscale", float), config.take("mscale_all_dim", float)
    attention_factor = config.take("attention_factor", float)
    if attention_factor is None:
        has_both = mscale and all_dim
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim) if has_both else _mscale(factor, 1.0)
    config.skip("max_position_embeddings")  # Mistral repeats it here
    return {
        "factor": factor,
        "beta_fast": config.take("beta_fast", float) or 32.0,
        "beta_slow": config.take("beta_slow", float) or 1.0,
        "truncate": config.take("truncate", bool, True),
        "attention_factor": attention_factor,
        "original_max_position": reading.original,
        "query_beta": config.take("llama_4_scaling_beta", float, 0.0),
        "score_factor": _mscale(factor, all_dim) ** 2 if all_dim else 1.0,
        "extends_to": int(factor * reading.original) if config.peek("original_max_position_embeddings") else 0,
    }


def _mscale(factor: float, mscale: float | None) -> float:
    return 1.0 if factor <= 1 else 0.1 * (mscale or 1.0) * math.log(factor) + 1.0


def _read_longrope(reading: _Reading) -> dict[str, Any]:
    """LongRoPE (https://arxiv.org/abs/2402.13753): one factor per pair, for short and for long contexts."""
    config, num_pairs = reading.config, reading.rotary_dim // 2
    factors = {key: config.take_floats(key) for key in ("short_factor", "long_factor")}
    for key, values in factors.items():
        if len(values) != num_pairs:
            raise ConfigError(
                f"{reading.config.origin} of type longrope has {len(values)} numbers in {key}; it must have one "
                f"for each of the {num_pairs} pairs that turn"
            )
    config.require_positive("original_max_position_embeddings")  # decides which factors are used
    if reading.original < 2:
        raise ConfigError(f"{config.origin} of type longrope: original_max_position_embeddings must be at least 2")
    factor = config.take("factor", float) or reading.max_position / reading.original
    attention_factor = config.take("attention_factor", float)
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(reading.original))
    return {
        **factors,
        "factor": factor,
        "attention_factor": attention_factor,
        "original_max_position": reading.original,
    }


# Each kind and the reader of its numbers.
_NUMBERS: dict[RopeKind, Callable[[_Reading], dict[str, Any]]] = {
    "default": lambda reading: {},
    "linear": lambda reading: {"factor": reading.positive("factor")},
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "proportional": lambda reading: {"factor": reading.config.take("factor", float, 1.0)},
}
