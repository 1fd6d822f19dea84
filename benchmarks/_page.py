"""The page of figures: tables and plots from the files that the benchmarks wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _interleave import Cells, Row, long_cells, wide_cells

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""What is between these lines of the page is replaced."""

TITLES = {
    "collectives": "Collectives",
    "train_vs_peers": "Training steps",
    "start_up": "Start-up",
    "scaling": "Growth with ranks and parameters",
}
LEGEND = """Ratios are the peer's time, or memory, over Hora's: above 1 Hora is ahead. "From" and "to" bound
the middle half of the rounds, or the lowest and the highest of all sizes, each of which the aim is for."""
WIDE = ("collectives", "scaling")


def fill(page: Path, files: dict[str, Any], summary: Cells) -> None:
    """Put the figures into the page, and the plots into a folder of the page's name beside it."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for figures. Write the lines {BEGIN} and {END} into it.")
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    figures = "\n\n".join(sections(files, summary, folder))
    page.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")


def sections(files: dict[str, Any], summary: Cells, folder: Path) -> Iterator[str]:
    yield _machine(next(iter(files.values()))["machine"])
    yield "## In one table\n\n" + LEGEND
    yield _markdown(summary)
    for benchmark, found in files.items():
        yield f"## {TITLES.get(benchmark, benchmark.replace('_', ' ').capitalize())}"
        yield f"```bash\n{found['command']}\n```"
        if benchmark in PLOTS:
            PLOTS[benchmark](found["rows"], folder / f"{benchmark}.svg")
            yield f"![{TITLES[benchmark]}]({folder.name}/{benchmark}.svg)"
        yield _markdown((wide_cells if benchmark in WIDE else long_cells)(found["rows"]))
        reasons = {name: reason.splitlines()[0] for name, reason in found["left_out"].items()}
        if reasons:
            yield "\n".join(f"- Left out: {name}: {reason}." for name, reason in reasons.items())


def _machine(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    return (
        f"Measured on {machine['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB of memory; Python {machine['python']}, {packages}. "
        "Times are medians of rounds in which the contenders take turns, with the middle half in brackets."
    )


def _markdown(cells: Cells) -> str:
    head, lines = cells
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _plot_collectives(rows: Sequence[Row], path: Path) -> None:
    """Time over size, one panel per number of ranks."""
    rows = [row for row in rows if row.case["collective"] == "all-reduce"]
    ranks = sorted({int(row.case["ranks"]) for row in rows})
    figure, panels = _panels(len(ranks))
    for panel, count in zip(panels, ranks, strict=True):
        for name, found in _by_contender(row for row in rows if row.case["ranks"] == count).items():
            ordered = sorted(found, key=lambda row: int(row.case["bytes"]))
            panel.plot(
                [int(row.case["bytes"]) for row in ordered],
                [row.spread.median for row in ordered],
                label=name,
                marker=".",
            )
        panel.set(xscale="log", yscale="log", title=f"all-reduce, {count} ranks", xlabel="bytes")
    panels[0].set_ylabel("seconds")
    panels[-1].legend()
    _save(figure, path)


def _plot_training(rows: Sequence[Row], path: Path) -> None:
    """Seconds of a step by contender, one panel per model."""
    rows = [row for row in rows if row.case["measure"] == "step"]
    models = list(dict.fromkeys(str(row.case["model"]) for row in rows))
    figure, panels = _panels(len(models))
    for panel, model in zip(panels, models, strict=True):
        found = [row for row in rows if row.case["model"] == model][::-1]
        medians = [1e3 * row.spread.median for row in found]
        low = [1e3 * (row.spread.median - row.spread.low) for row in found]
        high = [1e3 * (row.spread.high - row.spread.median) for row in found]
        colours = ["tab:orange" if row.contender.startswith("Hora") else "tab:blue" for row in found]
        panel.barh([row.contender for row in found], medians, xerr=[low, high], color=colours)
        panel.set(title=model, xlabel="ms per step")
    _save(figure, path)


def _plot_scaling(rows: Sequence[Row], path: Path) -> None:
    """Seconds of a step over ranks, and over parameters."""
    counts = [row.case["parameters"] for row in rows]
    middle = max(set(counts), key=counts.count)  # the one at which the ranks vary
    ranks = max(row.case["ranks"] for row in rows if row.case["parameters"] != middle)
    figure, panels = _panels(2)
    chosen = {
        "ranks": [row for row in rows if row.case["parameters"] == middle],
        "parameters": [row for row in rows if row.case["ranks"] == ranks],
    }
    for panel, (over, found) in zip(panels, chosen.items(), strict=True):
        for name, own in _by_contender(found).items():
            ordered = sorted(own, key=lambda row: int(row.case[over]))
            panel.plot(
                [row.case[over] for row in ordered],
                [row.spread.median for row in ordered],
                label=name,
                marker=".",
            )
        panel.set(xscale="log" if over == "parameters" else "linear", yscale="log", xlabel=over)
    panels[0].set(ylabel="seconds per step", title=f"{middle:,} parameters")
    panels[1].set(title=f"{ranks} ranks")
    panels[1].legend()
    _save(figure, path)


def _plot_start_up(rows: Sequence[Row], path: Path) -> None:
    """When each launcher has come how far."""
    figure, [panel] = _panels(1)
    for name, found in _by_contender(row for row in rows if row.unit == "s").items():
        panel.plot(
            [row.spread.median for row in found],
            [str(row.case["measure"]) for row in found],
            label=name,
            marker="o",
        )
    panel.invert_yaxis()
    panel.set_xlabel("seconds from the command")
    panel.legend()
    _save(figure, path)


PLOTS: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "collectives": _plot_collectives,
    "train_vs_peers": _plot_training,
    "scaling": _plot_scaling,
    "start_up": _plot_start_up,
}


def _by_contender(rows: Any) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.contender, []).append(row)
    return found


def _panels(count: int) -> tuple[Any, list[Any]]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("Plots need matplotlib. Write: pip install 'hora[bench]'") from None
    mpl.use("svg")
    # Text stays text, which is small; and the same figures give the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hora", "font.size": 8})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, count, figsize=(max(5.0, 3.4 * count), 3.2), squeeze=False, layout="constrained"
    )
    return figure, list(panels[0])


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
