"""The comparisons of tiers as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.panels import bars, picture

_ENGINES = {"on": "host tier", "off": "no tier", "one_pool": "one pool"}


def svg(report: Mapping[str, Any]) -> str:
    """A panel for first tokens, one for throughputs as multiples of the engine without a tier, one for hit rates."""
    panels = []
    if found := report.get("reload"):
        first = {name: [found[f"first_token_{name}_ms"]] for name in ("reloaded", "computed")}
        panels.append(bars("Milliseconds to the first token", first, [f"{found['tokens']} tokens"]))
    if groups := {
        name: [_relative(report[name], engine) for engine in _ENGINES]
        for name in ("chats", "fits", "sharers")
        if name in report
    }:
        panels.append(bars("Throughput (no tier: 1)", groups, tuple(_ENGINES.values())))
    if found := report.get("chats"):
        rates = {label: [found[f"{engine}_hit_percent"]] for engine, label in _ENGINES.items()}
        panels.append(bars("Prompt tokens that were cached (%)", rates, ["chats"], top=100.0))
    return picture(panels)


def _relative(found: Mapping[str, Any], engine: str) -> float | None:
    value = found.get(f"{engine}_tokens_per_s")
    return None if value is None else value / found["off_tokens_per_s"]
