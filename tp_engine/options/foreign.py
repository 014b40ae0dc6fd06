"""What becomes of options of vLLM and SGLang that this engine does not have: reads the table ``foreign.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tp_engine.options.foreign_rows import (
    OFF,
    Become,
    ForeignOption,
    ForeignValue,
    to_adapters,
    to_attention,
    to_choice,
    to_graphs,
    to_key,
    to_option,
)

_ARITIES = {"switches": "", "values": "=", "lists": "=*"}
_METHODS = {"NEXTN": "mtp", "STANDALONE": "draft_model"}
_RULES: Mapping[str, Callable[[Any], Any]] = {
    "above one": lambda size: True if size > 1 else None,
    "method": lambda name: _METHODS.get(name, name.lower()),
    "no images": lambda is_on: {"image": 0} if is_on else None,
    "one less": lambda number: number - 1,
    "pooling": lambda is_asked: "pooling" if is_asked else None,
    "zero": lambda level: True if level == 0 else None,
}
"""How a value becomes one of this engine; None: it sets nothing."""
_TRANSLATIONS: Mapping[str, Become] = {"adapters": to_adapters, "attention": to_attention, "graphs": to_graphs}
"""Rules that say which options a value sets, too."""


@cache
def foreign_options() -> Mapping[str, ForeignOption]:
    """Return the whole options of other servers, by their name in Python."""
    return {name: option for row in foreign_table()["option"] for name, option in _options(row)}


@cache
def foreign_values() -> Mapping[str, tuple[ForeignValue, ...]]:
    """Return the values of other servers for options that exist here, by the option's name."""
    found: dict[str, tuple[ForeignValue, ...]] = {}
    for row in foreign_table()["value"]:
        means, reason = row.get("means"), row.get("refused", row.get("reason", ""))
        value = ForeignValue(tuple(row["patterns"]), means, reason, row.get("is_file", False))
        found[row["of"]] = (*found.get(row["of"], ()), value)
    return found


@cache
def foreign_table() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the file."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _options(row: Mapping[str, Any]) -> Iterator[tuple[str, ForeignOption]]:
    is_translated = "becomes" in row
    off = (None,) if is_translated else OFF
    harmless = (None, *row["harmless"]) if "harmless" in row else (*off, *row.get("also_harmless", ()))
    names = [(name, arity) for key, arity in _ARITIES.items() for name in row.get(key, ())]
    for name, arity in names if is_translated else sorted(names):
        yield (
            name,
            ForeignOption(
                reason=row.get("accepted") or row.get("refused") or row.get("otherwise", ""),
                is_refused="refused" in row,
                become=_become(row) if is_translated else None,
                harmless=harmless,
                yields=row.get("yields", False),
                arity=arity,
                short_flags=tuple(row.get("short_flags", {}).get(name, ())),
            ),
        )


def _become(row: Mapping[str, Any]) -> Become:
    name, _, key = row["becomes"].partition(".")
    rule = row.get("by", "")
    if rule in _TRANSLATIONS:
        return _TRANSLATIONS[rule]
    if "choices" in row:
        return to_choice(name, row["choices"])
    of = _RULES[rule] if rule else _itself
    return to_key(name, key, of) if key else to_option(name, of)


def _itself(value: Any) -> Any:
    return value
