"""A line plot as SVG, without a plotting library: panels side by side, logarithmic axes, a line per series.

Measured points are filled, others hollow; a broken line leads to those. Colours come with dark and light pages alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

COLOURS = ("#3572b0", "#c45a1c", "#3f8f4f", "#8a5bb5")
_WIDTH, _HEIGHT = 330, 250  #: of a panel's plot
_LEFT, _TOP, _BELOW, _GAP = 58, 34, 62, 30
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    measured: bool = True


@dataclass(frozen=True)
class Panel:
    """``series``: name → points. ``level``: a horizontal line with its label."""

    title: str
    x_label: str
    series: dict[str, list[Point]] = field(default_factory=dict)
    level: tuple[float, str] | None = None


def svg(panels: Sequence[Panel]) -> str:
    """The panels as one document. Every coordinate must be above 0."""
    width = len(panels) * (_LEFT + _WIDTH + _GAP)
    height = _TOP + _HEIGHT + _BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i * (_LEFT + _WIDTH + _GAP) + _LEFT},{_TOP})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [p for line in panel.series.values() for p in line]
    ys = [p.y for p in points] + ([panel.level[0]] if panel.level else [])
    x_low, x_high = _decades([p.x for p in points])
    y_low, y_high = _decades(ys)

    def x_of(value: float) -> float:
        return (math.log10(value) - x_low) / (x_high - x_low) * _WIDTH

    def y_of(value: float) -> float:
        return _HEIGHT - (math.log10(value) - y_low) / (y_high - y_low) * _HEIGHT

    out = [f'<text x="0" y="-14" font-weight="bold">{escape(panel.title)}</text>']
    for k in range(x_low, x_high + 1):
        x = x_of(10**k)
        out.append(f'<path d="M{x:.1f} 0V{_HEIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{_power(k)}</text>')
    for k in range(y_low, y_high + 1):
        y = y_of(10**k)
        out.append(f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#ddd"/>')
        out.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{_power(k)}</text>')
    if panel.level is not None:
        y = y_of(panel.level[0])
        out.append(f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#b00" stroke-dasharray="2 3"/>')
        out.append(f'<text x="{_WIDTH}" y="{y - 5:.1f}" text-anchor="end" fill="#b00">{escape(panel.level[1])}</text>')
    for i, (name, line) in enumerate(panel.series.items()):
        out += _line(sorted(line, key=lambda p: p.x), x_of, y_of, COLOURS[i % len(COLOURS)])
        x = i * (_WIDTH // max(1, len(panel.series)))
        out.append(f'<circle cx="{x + 5}" cy="{_HEIGHT + 50}" r="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        out.append(f'<text x="{x + 14}" y="{_HEIGHT + 54}">{escape(name)}</text>')
    out.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 36}" text-anchor="middle">{escape(panel.x_label)}</text>')
    return out


def _line(line: list[Point], x_of: Callable[[float], float], y_of: Callable[[float], float], colour: str) -> list[str]:
    out = []
    for a, b in pairwise(line):
        dashes = "" if b.measured else ' stroke-dasharray="5 4"'
        path = f"M{x_of(a.x):.1f} {y_of(a.y):.1f}L{x_of(b.x):.1f} {y_of(b.y):.1f}"
        out.append(f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"{dashes}/>')
    for p in line:
        fill = colour if p.measured else "white"
        out.append(
            f'<circle cx="{x_of(p.x):.1f}" cy="{y_of(p.y):.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
        )
    return out


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around the values, at least one apart."""
    low = math.floor(math.log10(min(values)) + 1e-9)
    high = math.ceil(math.log10(max(values)) - 1e-9)
    return low, max(high, low + 1)


def _power(exponent: int) -> str:
    return {0: "1", 1: "10"}.get(exponent, "10" + str(exponent).translate(_SUPERSCRIPTS))
