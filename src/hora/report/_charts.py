"""Charts as small inline SVG: no script, colours from the page's style sheet, values on hover.

All are drawn on a canvas of 440 x 250 units that the page scales to its column. Texts from outside are
escaped here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from hora.core.plural import plural
from hora.report._scale import Axis, Point, thin

__all__ = ["Bar", "Box", "Curve", "Rule", "Stack", "bar_chart", "box_chart", "line_chart", "stack_chart"]

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 26, 42
MOST_POINTS = 800
MOST_STOPS = 100
"""Places on the x axis that show their values when pointed at."""
MOST_MARKERS = 60
MOST_STACKS = 64


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve.

    Attributes:
        name: for the legend and the values on hover.
        points: in the order of x.
        style: ``a``, ``b``, ``c`` (colours of the style sheet) or ``faint``.
        markers: draw a dot at each point, for few points.
        hover: whether its values are shown on hover.
    """

    name: str
    points: Sequence[Point]
    style: str = "a"
    markers: bool = False
    hover: bool = True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A horizontal line at a value that matters, such as the target."""

    name: str
    y: float


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar; ``rounds`` are the single measurements behind its value."""

    name: str
    value: float
    style: str = "a"
    rounds: Sequence[float] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Box:
    """The spread of one rank: 5th, 25th, 50th, 75th and 95th percentile."""

    name: str
    levels: tuple[float, float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One bar made of parts: (name, value, style), drawn in this order."""

    name: str
    parts: Sequence[tuple[str, float, str]]

    @property
    def total(self) -> float:
        return math.fsum(value for _, value, _ in self.parts)


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    rules: Sequence[Rule] = (),
    zero: bool = False,
    log: bool = False,
) -> str:
    """Curves over a common x axis; empty when no curve has a finite point."""
    curves = [replace(curve, points=thin(curve.points, MOST_POINTS)) for curve in curves]
    finite = [point for curve in curves for point in curve.points if math.isfinite(point[0] + point[1])]
    if not finite:
        return ""
    xs = [x for x, _ in finite]
    x_axis = Axis.around([0.0, *xs], snap=False)  # from the start, so that charts below each other align
    y_axis = Axis.around([y for _, y in finite] + [rule.y for rule in rules], zero=zero, log=log)
    placed = [_Placed(curve, x_axis, y_axis) for curve in curves]
    # A label that only repeats the title is clutter.
    shown_label = "" if y_label.lower() == title.lower() else y_label
    parts = [_grid(y_axis, shown_label), _x_axis(x_axis, x_label)]
    for rule in rules:
        y = _y(y_axis, rule.y)
        text = escape(f"{rule.name} {_value(rule.y)}")
        parts.append(f'<path class="rule" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        below = y < TOP + 20
        parts.append(
            f'<text class="rule-name" x="{LEFT + 6}" y="{_n(y + (15 if below else -6))}">{text}</text>'
        )
    parts += [curve.draw() for curve in placed]
    parts.append(_stops(placed, x_axis, x_label))
    last = "; ".join(
        f"{curve.curve.name} ends at {_value(curve.last)}" for curve in placed if curve.curve.hover
    )
    return _svg(title, f"{y_label} over {x_label}, {x_axis.low:g} to {x_axis.high:g}: {last}.", parts)


def box_chart(boxes: Sequence[Box], *, title: str, x_label: str, y_label: str) -> str:
    """One upright box per rank. The axis spans at least 20 % of the median, so that noise looks small."""
    if not boxes:
        return ""
    medians = sorted(box.levels[2] for box in boxes)
    middle = medians[len(medians) // 2]
    y_axis = Axis.around([*(level for box in boxes for level in box.levels), middle * 0.9, middle * 1.1])
    pitch = (WIDTH - LEFT - RIGHT) / len(boxes)
    wide = min(26.0, pitch * 0.62)
    every = math.ceil(len(boxes) / 16)
    parts = [_grid(y_axis, y_label), _x_title(x_label)]
    for index, box in enumerate(boxes):
        center = LEFT + pitch * (index + 0.5)
        low, lower, median, upper, high = (_y(y_axis, level) for level in box.levels)
        text = (
            "{}: 90 % from {} to {}, half from {} to {}, median {} ".format(
                box.name, *(_value(box.levels[at]) for at in (0, 4, 1, 3, 2))
            )
            + y_label
        )
        left, thin_wide = center - wide / 2, wide / 3
        parts.append(
            f'<g class="box"><title>{escape(text)}</title>'
            f'<rect class="hit" x="{_n(center - pitch / 2)}" y="{TOP}" width="{_n(pitch)}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>'
            f'<rect class="range" x="{_n(center - thin_wide / 2)}" y="{high}" width="{_n(thin_wide)}" '
            f'height="{_n(max(1.0, low - high))}"/>'
            f'<rect class="half" x="{_n(left)}" y="{upper}" width="{_n(wide)}" '
            f'height="{_n(max(1.0, lower - upper))}" rx="{_n(min(2.0, wide / 6))}"/>'
            f'<path class="median" d="M{_n(left)} {median}h{_n(wide)}"/></g>'
        )
        if index % every == 0:
            parts.append(_text("tick", _n(center), HEIGHT - BOTTOM + 16, str(index)))
    low, high = medians[0], medians[-1]
    ranks = f"{len(boxes)} {plural(len(boxes), 'rank')}"
    about = f"Median {y_label} of {ranks}, from {_value(low)} to {_value(high)}."
    return _svg(title, about, parts)


def bar_chart(bars: Sequence[Bar], *, title: str, unit: str) -> str:
    """Horizontal bars from zero, each with its value, and dots for the single measurements."""
    bars = [bar for bar in bars if math.isfinite(bar.value)]
    if not bars:
        return ""
    reach = max(max([bar.value, *bar.rounds]) for bar in bars)
    axis = Axis.around([reach], zero=True, count=4, snap=False)
    left, right, pitch = 96, 62, 50
    height = TOP + pitch * len(bars) + BOTTOM - 16
    width = WIDTH - left - right

    def place(value: float) -> float:
        return left + width * axis.place(value)

    parts = []
    for tick, label in zip(axis.ticks, axis.labels(), strict=True):
        x = _n(place(tick))
        parts.append(f'<path class="grid" d="M{x} 14V{height - 36}"/>')
        parts.append(_text("tick", x, height - 20, label))
    parts.append(_text("axis", left + width / 2, height - 3, unit))
    for index, bar in enumerate(bars):
        y = 22 + pitch * index
        rounds = ", ".join(_value(value) for value in bar.rounds)
        text = f"{bar.name}: {_value(bar.value)} {unit}" + (f" (rounds: {rounds})" if rounds else "")
        parts.append(
            f'<g class="bar {bar.style}"><title>{escape(text)}</title>'
            f'<rect x="{left}" y="{y}" width="{_n(max(1.0, place(bar.value) - left))}" height="26" rx="3"/>'
            f'<text class="name" x="{left - 10}" y="{y + 18}" text-anchor="end">{escape(bar.name)}</text>'
            + "".join(
                f'<circle class="round" cx="{_n(place(value))}" cy="{y + 13}" r="3"/>' for value in bar.rounds
            )
            + f'<text class="value" x="{_n(place(max([bar.value, *bar.rounds])) + 9)}" y="{y + 18}">'
            f"{_value(bar.value)}</text></g>"
        )
    about = "; ".join(f"{bar.name} {_value(bar.value)}" for bar in bars)
    return _svg(title, f"{about} ({unit}).", parts, height=height)


def stack_chart(stacks: Sequence[Stack], *, title: str, x_label: str, y_label: str) -> str:
    """Horizontal bars made of parts, from zero, one below the other; many become thin and touch."""
    if not stacks:
        return ""
    pitch = max(6.0, min(34.0, 420 / len(stacks)))
    left, gap = LEFT, pitch * 0.28 if len(stacks) <= MOST_STACKS / 2 else 0.0
    height = 14 + pitch * len(stacks) + BOTTOM
    width = WIDTH - left - RIGHT
    axis = Axis.around([max(stack.total for stack in stacks)], zero=True, count=5, snap=False)
    bottom = height - BOTTOM
    parts = [_text("axis", left + width / 2, _n(height - 6), x_label)]
    for tick, label in zip(axis.ticks, axis.labels(), strict=True):
        x = _n(left + width * axis.place(tick))
        parts.append(f'<path class="grid" d="M{x} 10V{_n(bottom)}"/>' + _text("tick", x, bottom + 16, label))
    every = math.ceil(13 / pitch)
    for index, stack in enumerate(stacks):
        y, at = 12 + pitch * index, 0.0
        total = stack.total or 1.0
        words = ", ".join(
            f"{name} {_value(value)} {x_label} ({100 * value / total:.0f} %)"
            for name, value, _ in stack.parts
        )
        parts.append(f'<g class="stack"><title>{escape(f"{y_label} {stack.name}: {words}")}</title>')
        for _, value, style in stack.parts:
            start, at = at, at + value
            wide = width * (axis.place(at) - axis.place(start))
            if wide > 0.02:
                parts.append(
                    f'<rect class="{style}" x="{_n(left + width * axis.place(start))}" y="{_n(y + gap / 2)}" '
                    f'width="{round(wide, 2)}" height="{_n(pitch - gap)}"/>'
                )
        parts.append("</g>")
        if index % every == 0:
            parts.append(
                f'<text class="tick" x="{left - 8}" y="{_n(y + pitch / 2 + 4)}" text-anchor="end">'
                f"{escape(stack.name)}</text>"
            )
    parts.append(f'<path class="base" d="M{left} 10V{_n(bottom)}"/>')
    parts.append(f'<text class="axis" x="0" y="8">{escape(y_label)}</text>')
    longest = max(stacks, key=lambda stack: stack.total)
    about = (
        f"{len(stacks)} bars, the longest, of {y_label} {longest.name}, {_value(longest.total)} {x_label}."
    )
    return _svg(title, about, parts, height=round(height))


class _Placed:
    """A curve with its points in canvas units."""

    def __init__(self, curve: Curve, x_axis: Axis, y_axis: Axis) -> None:
        self.curve = curve
        self.kept = [point for point in curve.points if math.isfinite(point[0])]
        self.places = [
            (_x(x_axis, x), _y(y_axis, y)) if math.isfinite(y) and (y > 0 or not y_axis.log) else None
            for x, y in self.kept
        ]
        self.last = next((y for _, y in reversed(curve.points) if math.isfinite(y)), math.nan)

    def draw(self) -> str:
        pieces, pen = [], "M"
        for index, place in enumerate(self.places):
            if place is None:
                pen = "M"
                continue
            pieces.append(f"{pen}{place[0]} {place[1]}")
            alone = pen == "M" and (index + 1 == len(self.places) or self.places[index + 1] is None)
            if alone:  # a point without neighbours would be invisible as a line
                pieces.append("h0.01")
            pen = "L"
        style = self.curve.style
        drawn = f'<path class="curve {style}" d="{"".join(pieces)}"/>'
        dots = [place for place in self.places if place is not None]
        if self.curve.markers and len(dots) <= MOST_MARKERS:
            drawn += "".join(f'<circle class="dot {style}" cx="{x}" cy="{y}" r="2.6"/>' for x, y in dots)
        return drawn


def _stops(curves: Sequence[_Placed], x_axis: Axis, x_label: str) -> str:
    """Invisible strips over the chart; the one pointed at shows a guide, dots and the values."""
    shown = [curve for curve in curves if curve.curve.hover]
    places = sorted({place[0] for curve in shown for place in curve.places if place is not None})
    if len(places) > MOST_STOPS:
        places = [places[index * (len(places) - 1) // (MOST_STOPS - 1)] for index in range(MOST_STOPS)]
    edges = [
        float(LEFT),
        *((a + b) / 2 for a, b in itertools.pairwise(places)),
        float(WIDTH - RIGHT),
    ]
    parts = []
    for at, start, stop in zip(places, edges, edges[1:], strict=False):
        x = x_axis.low + (at - LEFT) / (WIDTH - LEFT - RIGHT) * (x_axis.high - x_axis.low)
        texts, dots = [f"{x_label} {x:.4g}"], ""
        for curve in shown:
            near = _nearest(curve, at, reach=max(stop - at, at - start) + 0.2)
            if near is not None:
                texts.append(f"{curve.curve.name} {_value(near[1])}")
                dots += f'<circle class="dot {curve.curve.style}" cx="{near[0][0]}" cy="{near[0][1]}" r="4"/>'
        text = escape("   ".join(texts))
        parts.append(
            f'<g class="stop"><rect class="hit" x="{_n(start)}" y="0" width="{_n(stop - start)}" '
            f'height="{HEIGHT - BOTTOM}"/><path class="guide" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>{dots}'
            f'<text class="readout" x="{WIDTH - RIGHT}" y="14" text-anchor="end">{text}</text></g>'
        )
    return "".join(parts)


def _nearest(curve: _Placed, at: float, *, reach: float) -> tuple[tuple[float, float], float] | None:
    best = None
    for place, (_, y) in zip(curve.places, curve.kept, strict=True):
        if place is not None and abs(place[0] - at) <= reach:
            reach, best = abs(place[0] - at), (place, y)
    return best


def _svg(title: str, about: str, parts: Sequence[str], *, height: int = HEIGHT) -> str:
    name = escape(f"{title}. {about}")
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">' + "".join(parts) + "</svg>"


def _grid(axis: Axis, label: str) -> str:
    name = ", ".join(filter(None, (label, "log scale" if axis.log else "")))
    parts = [f'<text class="axis" x="0" y="14">{escape(name)}</text>']
    for tick, text in zip(axis.ticks, axis.labels(), strict=True):
        y = _y(axis, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{_n(y + 4)}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _x_axis(axis: Axis, label: str) -> str:
    parts = [_x_title(label)]
    for tick, text in zip(axis.ticks, axis.labels(), strict=True):
        x = _x(axis, tick)
        parts.append(f'<path class="notch" d="M{x} {HEIGHT - BOTTOM}v4"/>')
        parts.append(
            f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>'
        )
    return "".join(parts)


def _x_title(label: str) -> str:
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    return f'<path class="base" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>' + _text(
        "axis", middle, HEIGHT - 6, label
    )


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _x(axis: Axis, value: float) -> float:
    return _n(LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT))


def _y(axis: Axis, value: float) -> float:
    return _n(HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM))


def _n(value: float) -> float:
    """Canvas units to a tenth: less is not visible, more only makes the page larger."""
    return round(value, 1)


def _value(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 0.001:
        return f"{value:.2e}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3f}"
