"""Pictures of plans, each a file of its own: the curve over the number of GPUs, predicted over published."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from hora.plan.question import Prediction
from hora.plan.scores import Score, families
from hora.plan.text import time

__all__ = ["scatter_svg", "sweep_svg"]

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 20, 58, 54
MOST_TICKS = 9
COLOURS = (
    "#3b6fb6",
    "#d1702b",
    "#3d8f5f",
    "#8a5fb0",
    "#b04a5a",
    "#6b7280",
    "#a08a2c",
    "#2c8c99",
    "#111111",
    "#e377a8",
)
STYLE = """<style>
svg { background: #fff; font: 13px 'DejaVu Sans', system-ui, sans-serif; } text { fill: #333; }
.grid { stroke: #e3e3e3; } .base { stroke: #888; } .ideal { stroke: #999; stroke-dasharray: 5 4; fill: none; }
.band { fill: #3b6fb6; opacity: 0.18; } .curve { fill: none; stroke: #3b6fb6; stroke-width: 2; }
text.title { font-size: 15px; font-weight: 600; }
</style>"""


class _Canvas:
    """Two logarithmic axes and what is drawn between them."""

    def __init__(self, title: str, xs: Sequence[float], ys: Sequence[float], *, height: int = HEIGHT) -> None:
        self._x_range, self._y_range = _around(xs), _around(ys)
        self._height = height
        self._title = title
        self.parts: list[str] = [f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>']

    def x(self, value: float) -> float:
        return round(LEFT + _share(value, self._x_range) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - _share(value, self._y_range) * (HEIGHT - TOP - BOTTOM), 1)

    def axes(
        self, x_label: str, y_label: str, x_text: Callable[[float], str], y_text: Callable[[float], str]
    ) -> None:
        places = _time_ticks if y_text is time else _ticks
        for value in places(self._y_range):
            self.parts.append(f'<path class="grid" d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}"/>')
            self._text(LEFT - 8, self.y(value) + 4, y_text(value), "end")
        for value in _ticks(self._x_range):
            self.parts.append(f'<path class="grid" d="M{self.x(value)} {TOP}V{HEIGHT - BOTTOM}"/>')
            self._text(self.x(value), HEIGHT - BOTTOM + 18, x_text(value), "middle")
        self.parts.append(f'<path class="base" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle")
        self._text(LEFT, TOP - 10, y_label, "start")

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img" '
            f'aria-label="{escape(self._title)}">{STYLE}{"".join(self.parts)}</svg>\n'
        )


def _around(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high < 1.05 * low:
        low, high = low / 2, high * 2
    edge = (high / low) ** 0.04
    return low / edge, high * edge


def _share(value: float, limits: tuple[float, float]) -> float:
    return math.log(value / limits[0]) / math.log(limits[1] / limits[0])


def _ticks(limits: tuple[float, float], steps: Sequence[float] = (1, 2, 5)) -> list[float]:
    """1, 2 and 5 times powers of ten within the limits; of many, the powers alone."""
    low, high = (math.floor(math.log10(limit)) for limit in limits)
    found = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    inside = [value for value in found if limits[0] <= value <= limits[1]]
    return inside if len(inside) <= MOST_TICKS or len(steps) == 1 else _ticks(limits, (1,))


TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 18_000, 43_200, 86_400, 172_800, 432_000]


def _time_ticks(limits: tuple[float, float]) -> list[float]:
    """Seconds that read well as seconds, minutes, hours and days."""
    inside = [float(value) for value in TIMES if limits[0] <= value <= limits[1]]
    return inside or _ticks(limits)


def _number(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def sweep_svg(found: Sequence[Prediction]) -> str:
    """Time to train over the number of GPUs, or samples per second where none is known, with its interval."""
    trained = [one for one in found if one.training is not None]
    timed = len(trained) == len(found)
    pairs = [(one.question.gpus, one.training if timed and one.training else one.rate) for one in found]
    asked = found[0].question
    title = f"{asked.name} on {asked.machine.name}"
    canvas = _Canvas(title, [x for x, _ in pairs], [v for _, i in pairs for v in (i.low, i.high)])
    label = "time to train" if timed else f"{found[0].unit} per second"
    canvas.axes("GPUs", f"{label}, 80 % interval", _number, time if timed else _number)
    upper = " ".join(f"{canvas.x(x)},{canvas.y(interval.high)}" for x, interval in pairs)
    lower = " ".join(f"{canvas.x(x)},{canvas.y(interval.low)}" for x, interval in reversed(pairs))
    canvas.parts.append(f'<polygon class="band" points="{upper} {lower}"/>')
    line = " ".join(f"{canvas.x(x)},{canvas.y(interval.value)}" for x, interval in pairs)
    canvas.parts.append(f'<polyline class="curve" points="{line}"/>')
    for x, interval in pairs:
        shown = time(interval.value) if timed else _number(round(interval.value))
        canvas.parts.append(
            f'<circle cx="{canvas.x(x)}" cy="{canvas.y(interval.value)}" r="4" fill="{COLOURS[0]}">'
            f"<title>{x:,} GPUs: {escape(shown)}</title></circle>"
        )
    return canvas.svg()


REACH = 2.0
"""Figures that are further off than this factor are drawn at the edge."""


def scatter_svg(scores: Sequence[Score]) -> str:
    """Predicted over published by the number of GPUs, of all rows about time; the band is 15 % either way."""
    groups = {
        name: some
        for name, some in families(scores).items()
        if any(score.gpus > 1 for score in some)  # epochs, bytes and single collectives have no place here
    }
    counts = [score.gpus for some in groups.values() for score in some]
    height = HEIGHT + 20 * ((len(groups) + 1) // 2) + 10
    title = "Predicted over published, rows by their number of GPUs"
    canvas = _Canvas(title, counts or [1, 8], [1 / REACH, REACH], height=height)
    canvas.axes("GPUs", "predicted / published; band: 15 % off", _number, lambda value: f"{value:g}")
    top, bottom = canvas.y(1.15), canvas.y(1 / 1.15)
    canvas.parts.append(
        f'<rect class="band" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - top:g}"/>'
        f'<path class="ideal" d="M{LEFT} {canvas.y(1)}H{WIDTH - RIGHT}"/>'
    )
    for index, (name, some) in enumerate(groups.items()):
        paint = f'fill="{COLOURS[index % len(COLOURS)]}"'
        opacity = 0.3 if len(some) > 100 else 0.9
        for place, score in enumerate(some):
            beside = 1 + 0.12 * ((place * 0.618) % 1 - 0.5) * 2  # apart, so that equal counts can be seen
            ratio = min(REACH, max(1 / REACH, score.predicted / score.published))
            canvas.parts.append(
                f'<circle cx="{canvas.x(score.gpus * beside)}" cy="{canvas.y(ratio)}" r="3.2" {paint} '
                f'opacity="{opacity}"><title>{escape(score.what)}: {score.error:+.1%}</title></circle>'
            )
        x, y = LEFT + index % 2 * 280, HEIGHT + 12 + 20 * (index // 2)
        canvas.parts.append(
            f'<circle cx="{x}" cy="{y - 4}" r="4" {paint}/><text x="{x + 10}" y="{y}">{escape(name)}</text>'
        )
    return canvas.svg()
