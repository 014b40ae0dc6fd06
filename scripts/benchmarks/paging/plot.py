"""The three comparisons as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.panels import bars, lines, picture


def svg(report: Mapping[str, Any]) -> str:
    """A panel for each part that was measured."""
    panels = []
    if rows := report.get("memory"):
        shares = {row["trace"]: (100 * row["paged"], 100 * row["contiguous"]) for row in rows}
        panels.append(bars("Share of the pool that holds tokens (%)", shares, ("paged", "contiguous"), top=100.0))
    if rows := report.get("throughput"):
        series = {name: [(row["requests"], row[name]) for row in rows] for name in ("paged", "contiguous")}
        panels.append(lines("Output tokens per second", "requests at once", series))
    if found := report.get("kv_cache"):
        points = found["points"]
        series = {"with KV cache": [p[:2] for p in points], "without": [(p[0], p[2]) for p in points]}
        panels.append(lines("Milliseconds per token", "tokens generated", series))
    return picture(panels)
