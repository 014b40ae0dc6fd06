"""Panels of a benchmark's picture (SVG, written by hand): bars and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 440, 300, 64, 34, 16, 60
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c")

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Label -> points (x, y)."""


def picture(panels: Sequence[str]) -> str:
    """The panels side by side, as one file."""
    placed = [f'<g transform="translate({number * _WIDTH},0)">{panel}</g>' for number, panel in enumerate(panels)]
    size = f'width="{max(1, len(panels)) * _WIDTH}" height="{_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(placed)}</svg>\n'


def bars(
    title: str, groups: Mapping[str, Sequence[float | None]], labels: Sequence[str], top: float | None = None
) -> str:
    """A group of bars for each name, one for each label; None leaves a gap.  The axis ends at ``top``, or the greatest
    value."""
    top = top or max((value for values in groups.values() for value in values if value is not None), default=0.0) or 1.0
    parts = [_frame(title, top)]
    slot = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    width = 0.7 * slot / len(labels)
    for index, (name, values) in enumerate(groups.items()):
        left = _LEFT + slot * index
        for number, value in enumerate(values):
            if value is None:
                continue
            x, y = left + slot * 0.15 + width * number, _y(value, top)
            height = _HEIGHT - _BOTTOM - y
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_COLOURS[number]}"/>'
            )
        parts.append(_text(left + slot / 2, _HEIGHT - _BOTTOM + 16, name, "middle"))
    return "".join(parts) + _legend(labels)


def lines(title: str, x_title: str, series: Series) -> str:
    """Axes from 0 to the greatest value."""
    right = max(x for points in series.values() for x, _ in points) or 1.0
    top = max(y for points in series.values() for _, y in points) or 1.0
    parts = [_frame(title, top)]
    width = _WIDTH - _LEFT - _RIGHT
    for points, colour in zip(series.values(), _COLOURS, strict=False):
        path = " ".join(f"{_LEFT + width * x / right:.1f},{_y(y, top):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for step in range(1, 5):
        x = right * step / 4
        parts.append(_text(_LEFT + width * step / 4, _HEIGHT - _BOTTOM + 16, f"{x:g}", "middle"))
    parts.append(_text(_LEFT + width / 2, _HEIGHT - _BOTTOM + 32, x_title, "middle"))
    return "".join(parts) + _legend(tuple(series))


def _frame(title: str, top: float) -> str:
    parts = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for step in range(5):
        y = _y(step / 4, 1.0)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{top * step / 4:.4g}", "end"))
    return "".join(parts)


def _legend(labels: Sequence[str]) -> str:
    y = _HEIGHT - 8
    return "".join(
        f'<text x="{_LEFT + 130 * number}" y="{y}" fill="{colour}">{escape(label)}</text>'
        for number, (label, colour) in enumerate(zip(labels, _COLOURS, strict=False))
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _y(value: float, top: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)
