"""The plots of the page of figures, as SVG files that are readable in a light and in a dark scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _interleave import Row, size

INK, FAINT, PAPER = "#222222", "#d8d8d8", "#ffffff"
"""What the style below replaces in a dark scheme; the colours of lines and bars suit both."""

DARK = {INK: "#dcdcdc", FAINT: "#454b54", PAPER: "#1e2127"}
OURS = ("#e8710a", "#e53935")
PEERS = ("#4285f4", "#2e9e4f", "#8e63ce", "#12a4af", "#8d6e63", "#9aa0a6")
Plot = Callable[[Sequence[Row], Path], bool]
"""Draws a file; False: there was nothing to draw."""


def plot_collectives(rows: Sequence[Row], path: Path) -> bool:
    """Time over size of the all-reduce, one panel per number of ranks."""
    rows = [row for row in rows if row.case["collective"] == "all-reduce"]
    return _times_over_bytes(_groups(rows, "ranks", "all-reduce, {} ranks"), path)


def plot_other_collectives(rows: Sequence[Row], path: Path) -> bool:
    """Time over size, one panel per other collective."""
    rows = [row for row in rows if row.case["collective"] != "all-reduce" and row.case["ranks"] == 2]
    return _times_over_bytes(_groups(rows, "collective", "{}, 2 ranks"), path)


def plot_training(rows: Sequence[Row], path: Path) -> bool:
    """Time of a step by contender, one panel per model."""
    rows = [row for row in rows if row.case["measure"] == "step" and row.case["ranks"] == 2]
    return _bars(_groups(rows, "model", "{}, 2 ranks"), path, label="ms per step", scale=1e3)


def plot_memory(rows: Sequence[Row], path: Path) -> bool:
    """Peak memory of a rank by contender, one panel per model."""
    rows = [row for row in rows if row.case["measure"] == "peak memory" and row.case["ranks"] == 2]
    return _bars(_groups(rows, "model", "{}, 2 ranks"), path, label="peak memory of a rank, MB", scale=1e-6)


def plot_optimizer_memory(rows: Sequence[Row], path: Path) -> bool:
    """The optimizer's memory of a rank by contender, one panel per model and number of ranks."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.case["measure"] == "optimizer memory":
            groups.setdefault(f"{row.case['model']}, {row.case['ranks']} ranks", []).append(row)
    return _bars(groups, path, label="optimizer memory of a rank, MB", scale=1e-6)


def plot_guard(rows: Sequence[Row], path: Path) -> bool:
    """How much longer a step takes with the guard, in percent, with an interval of 95 %."""
    rows = [row for row in rows if row.contender != row.base and row.ratio is not None][::-1]
    if not rows:
        return False
    figure, [panel] = _panels(1)
    cost = [[100 * (1 / value - 1) for value in row.ratio or ()] for row in rows]
    middle = [one[0] for one in cost]
    bounds = [[one[0] - one[2] for one in cost], [one[1] - one[0] for one in cost]]
    names = [str(row.case["model"]) for row in rows]
    panel.barh(names, middle, xerr=bounds, height=0.5, color=OURS[0], ecolor=INK)
    panel.set_ylim(-0.7, len(rows) - 0.3)
    panel.axvline(0, color=INK, linewidth=0.8)
    panel.axvline(1, color=PEERS[0], linewidth=0.8, linestyle="--")
    panel.set(xlabel="CPU time of a step that the guard adds, % (dashed: the aim, 1 %)")
    _save(figure, path)
    return True


def plot_scaling(rows: Sequence[Row], path: Path) -> bool:
    """Time of a step over ranks, and over parameters."""
    if len({row.case["parameters"] for row in rows}) < 2:
        return False
    counts = [row.case["parameters"] for row in rows]
    middle = max(set(counts), key=counts.count)  # the one at which the ranks vary
    ranks = max(row.case["ranks"] for row in rows if row.case["parameters"] != middle)
    figure, panels = _panels(2)
    chosen = {
        "ranks": [row for row in rows if row.case["parameters"] == middle],
        "parameters": [row for row in rows if row.case["ranks"] == ranks],
    }
    for panel, (over, found) in zip(panels, chosen.items(), strict=True):
        _lines(panel, found, over)
        panel.set_xscale("log", base=2 if over == "ranks" else 10)
        ticks = sorted({int(row.case[over]) for row in found})
        _ticks(panel.xaxis, ticks, str if over == "ranks" else _count)
    panels[0].set(title=f"{_count(int(middle))} parameters", xlabel="ranks", ylabel="time of a step")
    panels[1].set(title=f"{ranks} ranks", xlabel="parameters")
    _legend(figure, panels)
    _save(figure, path)
    return True


def plot_start_up(rows: Sequence[Row], path: Path) -> bool:
    """When each launcher has come how far."""
    figure, [panel] = _panels(1)
    found = _by_contender(row for row in rows if row.unit == "s")
    for colour, (name, own) in zip(_colours(found), found.items(), strict=True):
        medians, stages = [row.spread.median for row in own], [str(row.case["measure"]) for row in own]
        panel.plot(medians, stages, label=name, marker="o", color=colour)
    panel.invert_yaxis()
    panel.set(xlabel="seconds from the command", xlim=(0, None))
    _legend(figure, [panel])
    _save(figure, path)
    return True


PLOTS: dict[str, dict[str, Plot]] = {
    "collectives": {"collectives": plot_collectives, "collectives-others": plot_other_collectives},
    "train_vs_peers": {
        "train_vs_peers": plot_training,
        "memory": plot_memory,
        "optimizer-memory": plot_optimizer_memory,
    },
    "guard_cost": {"guard_cost": plot_guard},
    "scaling": {"scaling": plot_scaling},
    "start_up": {"start_up": plot_start_up},
}
"""By benchmark, and by name of the file."""


def _times_over_bytes(groups: dict[str, list[Row]], path: Path) -> bool:
    if not groups:
        return False
    figure, panels = _panels(len(groups))
    for panel, (title, rows) in zip(panels, groups.items(), strict=True):
        _lines(panel, rows, "bytes")
        panel.set_xscale("log", base=2)
        counts = [int(row.case["bytes"]) for row in rows]
        least, most = min(counts), max(counts)
        between = [count for count in (2**12, 2**20) if 2**5 * least <= count <= most / 2**5]
        _ticks(panel.xaxis, sorted({least, *between, most}), size)
        panel.set(title=title, xlabel="size")
    panels[0].set_ylabel("time of a call")
    _legend(figure, panels)
    _save(figure, path)
    return True


def _bars(groups: dict[str, list[Row]], path: Path, *, label: str, scale: float) -> bool:
    if not groups:
        return False
    figure, panels = _panels(len(groups))
    for panel, (title, rows) in zip(panels, groups.items(), strict=True):
        found = rows[::-1]
        medians = [scale * row.spread.median for row in found]
        low = [scale * (row.spread.median - row.spread.low) for row in found]
        high = [scale * (row.spread.high - row.spread.median) for row in found]
        colours = [OURS[0] if row.contender.startswith("Hora") else PEERS[0] for row in found]
        bounds = [low, high] if any(low) or any(high) else None
        panel.barh([row.contender for row in found], medians, xerr=bounds, color=colours, ecolor=INK)
        panel.set(title=title, xlabel=label)
    _save(figure, path)
    return True


def _lines(panel: Any, rows: Sequence[Row], over: str) -> None:
    """The median over a number of the case, of each contender, with the middle half as a band."""
    found = _by_contender(rows)
    for colour, (name, own) in zip(_colours(found), found.items(), strict=True):
        ordered = sorted(own, key=lambda row: int(row.case[over]))
        places = [int(row.case[over]) for row in ordered]
        spreads = [row.spread for row in ordered]
        panel.plot(places, [one.median for one in spreads], label=name, marker=".", color=colour)
        panel.fill_between(
            places, [one.low for one in spreads], [one.high for one in spreads], color=colour, alpha=0.2, lw=0
        )
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(_decades(between=high < 100 * low))
    panel.yaxis.set_major_formatter(_formatter(_seconds))
    panel.yaxis.set_minor_formatter(_formatter(lambda value: ""))


def _ticks(axis: Any, places: Sequence[int], show: Callable[[int], str]) -> None:
    axis.set_ticks(places, [show(place) for place in places])
    axis.set_ticks([], minor=True)


def _decades(*, between: bool) -> Any:
    """Ticks at powers of ten, and at twice and five times as much where there is room."""
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1.0, 2.0, 5.0) if between else (1.0,))


def _formatter(show: Callable[[float], str]) -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, place: show(value))


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.3g} us"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _count(value: int) -> str:
    return f"{value / 1e6:.3g} M" if value >= 1e5 else f"{value:,}"


def _groups(rows: Sequence[Row], key: str, title: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(title.format(row.case[key]), []).append(row)
    return groups


def _by_contender(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.contender, []).append(row)
    return found


def _colours(names: Iterable[str]) -> list[str]:
    """Warm ones for Hora, cool ones for the others, in the order of the names."""
    ours, peers = iter(OURS), iter(PEERS)
    return [next(ours) if name.lower().startswith("hora") else next(peers) for name in names]


def _panels(count: int) -> tuple[Any, list[Any]]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("Plots need matplotlib. Write: pip install 'hora[bench]'") from None
    mpl.use("svg")
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    colours |= dict.fromkeys(("axes.edgecolor", "grid.color", "legend.edgecolor"), FAINT)
    colours |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER)
    mpl.rcParams.update(colours)
    # Text stays text, which is small; and the same figures give the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hora", "font.size": 9})
    mpl.rcParams.update({"axes.grid": True, "axes.axisbelow": True, "legend.frameon": False})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, count, figsize=(max(6.0, 3.3 * count), 3.4), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)
    return figure, list(panels[0])


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """One legend of all panels, below them."""
    found = {}
    for panel in panels:
        found.update(dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True)))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 5))


def _save(figure: Any, path: Path) -> None:
    """Write the file, with a style for dark schemes."""
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}: {dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    text = path.read_text(encoding="utf-8")
    place = "</style>"
    if place not in text:
        raise AssertionError(f"{path} has no style to add to")
    style = f"@media (prefers-color-scheme: dark){{{rules}}}"
    path.write_text(text.replace(place, style + place, 1), encoding="utf-8")
