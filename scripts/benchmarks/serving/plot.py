"""The sweep as a picture (SVG, written by hand): latencies and throughput over the request rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 440, 280, 64, 34, 110, 44
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


@dataclass(frozen=True)
class Panel:
    """One diagram: a line per (label, field of a result)."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]


def panels(percentiles: Sequence[float]) -> list[Panel]:
    """Latencies with their median and highest percentile; tokens and requests per second."""
    top = f"p{max(percentiles):g}"
    latencies = [
        Panel(title, "ms", [("median", f"median_{name}_ms"), (top, f"{top}_{name}_ms")])
        for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("itl", "Gap"))
    ]
    served = [("completed", "request_throughput"), ("within limits", "request_goodput")]
    return [*latencies, Panel("Output", "tokens/s", [("mean", "output_throughput")]), Panel("Served", "req/s", served)]


def svg(title: str, results: Sequence[Mapping[str, Any]], percentiles: Sequence[float]) -> str:
    """The picture; one column of points per result, in the order given."""
    shown = panels(percentiles)
    columns = 2
    rows = -(-len(shown) // columns)
    parts = [
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        *(
            f'<g transform="translate({index % columns * _WIDTH},{30 + index // columns * _HEIGHT})">'
            f"{_panel(panel, results)}</g>"
            for index, panel in enumerate(shown)
        ),
    ]
    size = f'width="{columns * _WIDTH}" height="{30 + rows * _HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


def _panel(panel: Panel, results: Sequence[Mapping[str, Any]]) -> str:
    lines = [(label, [result[field] for result in results]) for label, field in panel.lines]
    lines = [(label, values) for label, values in lines if None not in values]
    top = max((value for _, values in lines for value in values), default=0.0) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    at_x = [_LEFT + width * (index + 0.5) / len(results) for index in range(len(results))]
    parts = [f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{panel.title} ({panel.unit})</text>']
    for step in range(5):
        y = _TOP + height * (1 - step / 4)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * step / 4:.4g}</text>')
    for x, result in zip(at_x, results, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{_TOP + height + 16}" text-anchor="middle">{result["request_rate"]}</text>')
    middle, below = _LEFT + width / 2, _TOP + height + 34
    parts.append(f'<text x="{middle}" y="{below}" text-anchor="middle">requests per second offered</text>')
    for number, (label, values) in enumerate(lines):
        points = [(x, _TOP + height * (1 - value / top)) for x, value in zip(at_x, values, strict=True)]
        parts.append(_line(label, points, _COLOURS[number], _TOP + 14 * number + 8))
    return "".join(parts)


def _line(label: str, points: Sequence[tuple[float, float]], colour: str, legend_y: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    legend = f'<text x="{_WIDTH - _RIGHT + 8}" y="{legend_y}" fill="{colour}">{escape(label)}</text>'
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{legend}'
