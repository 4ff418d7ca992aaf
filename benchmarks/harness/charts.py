"""Results as SVG, written by hand: bars for rates, dots on a logarithmic axis for latencies, curves for what
grows.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from harness.tables import digits

WIDTH = 760
LABEL = 150
RIGHT = 90
ROW = 24
TOP = 44
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 14px; font-weight: 600; }
.small { font-size: 11px; fill: #57606a; }
.bar { fill: #8c959f; } .ours { fill: #bf8700; } .raw { fill: #afb8c1; }
.a { fill: #bf8700; stroke: #bf8700; } .b { fill: #0969da; stroke: #0969da; }
.c { fill: #1a7f37; stroke: #1a7f37; } path { fill: none !important; stroke-width: 2; }
.line { stroke: #57606a; stroke-width: 1; } .grid { stroke: #d0d7de; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #8d96a0; } .bar { fill: #6e7681; } .raw { fill: #484f58; }
  .line { stroke: #8d96a0; } .grid { stroke: #30363d; }
}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its spread; `kind` is a class of STYLE."""

    label: str
    value: float
    low: float
    high: float
    kind: str = "bar"


def bars(title: str, unit: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from zero, with the spread of repeated runs as a thin line."""
    most = max((row.high for row in rows), default=1.0) or 1.0
    scale = (WIDTH - LABEL - RIGHT) / most
    parts = []
    for place, row in enumerate(rows):
        y = TOP + place * ROW
        parts.append(_text(LABEL - 8, y + 15, row.label, anchor="end"))
        parts.append(_bar(LABEL, y + 3, row.value * scale, row.kind))
        if row.high > row.low:
            parts.append(_line(LABEL + row.low * scale, y + 11, LABEL + row.high * scale, y + 11))
        parts.append(_text(LABEL + row.high * scale + 6, y + 15, digits(row.value)))
    return _svg(title, unit, len(rows), parts)


def dots(title: str, unit: str, rows: Sequence[Bar]) -> str:
    """Each row a line from its low (p50) to its high (p99), on a logarithmic axis with decades marked."""
    values = [value for row in rows for value in (row.low, row.high) if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    scale = (WIDTH - LABEL - RIGHT) / (last - first)

    def x(value: float) -> float:
        return LABEL + (math.log10(max(value, 10**first)) - first) * scale

    bottom = TOP + len(rows) * ROW
    parts = []
    for decade in range(first, last + 1):
        parts.append(_line(x(10**decade), TOP, x(10**decade), bottom, "grid"))
        parts.append(_text(x(10**decade), bottom + 14, f"{10**decade:g}", anchor="middle", kind="small"))
    for place, row in enumerate(rows):
        y = TOP + place * ROW + 11
        parts.append(_text(LABEL - 8, y + 4, row.label, anchor="end"))
        parts.append(_line(x(row.low), y, x(row.high), y))
        parts.append(_dot(x(row.low), y, row.kind))
        parts.append(_dot(x(row.high), y, row.kind))
        parts.append(_text(x(row.high) + 8, y + 4, f"{digits(row.low)} / {digits(row.high)}"))
    return _svg(title, unit, len(rows), parts)


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    points: Sequence[tuple[float, float]]


KINDS = ("a", "b", "c")
CURVES = 9  # rows that they are high


def curves(title: str, unit: str, found: Sequence[Curve]) -> str:
    """Values from zero over sizes on a logarithmic axis (a size of 0 stands where 1 does)."""
    sizes = [max(size, 1.0) for curve in found for size, _ in curve.points]
    first, last = math.log10(min(sizes)), math.log10(max(sizes))
    across = (WIDTH - LABEL - RIGHT) / max(last - first, 1e-9)
    bottom, most = TOP + CURVES * ROW, max(value for curve in found for _, value in curve.points)

    def at(size: float, value: float) -> tuple[float, float]:
        x = LABEL + (math.log10(max(size, 1.0)) - first) * across
        return x, bottom - value / (most or 1.0) * (CURVES - 1) * ROW

    parts = [_line(LABEL, bottom, WIDTH - RIGHT, bottom, "grid")]
    parts += [
        _text(at(size, 0)[0], bottom + 14, f"{size:,.0f}", anchor="middle", kind="small")
        for size in sorted({size for curve in found for size, _ in curve.points})
    ]
    for kind, curve in zip(KINDS, found, strict=False):
        placed = [at(size, value) for size, value in curve.points]
        drawn = " ".join(f"{'ML'[n > 0]}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(placed))
        parts.append(f'<path class="{kind}" d="{drawn}"/>')
        parts += [_dot(x, y, kind) for x, y in placed]
        (x, y), (_, value) = placed[-1], curve.points[-1]
        parts.append(_text(x + 8, y + 4, f"{curve.label} {digits(value)}"))
    return _svg(title, unit, CURVES, parts)


def _svg(title: str, unit: str, rows: int, parts: Sequence[str]) -> str:
    height = TOP + rows * ROW + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" role="img">'
    )
    top = [
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        _text(8, 18, title, kind="title"),
        _text(8, 34, unit, kind="small"),
    ]
    return "\n".join([head, *top, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    class_ = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{class_}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="16" rx="2"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
