"""The page of figures: tables and plots from the files that the benchmarks wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _interleave import Cells, long_cells, wide_cells
from _parts import PARTS
from _plots import PLOTS

if TYPE_CHECKING:
    from summary import Results

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""What is between these lines of the page is replaced."""

TITLES = {
    "collectives": "Collectives",
    "train_vs_peers": "Training steps and memory",
    "guard_cost": "What the guard costs",
    "scaling": "Growth with ranks and parameters",
    "start_up": "Start-up",
    "resnet_speed": "What makes one worker fast on ResNet",
    "horovod_overhead": "What matching by name costs",
    "guard_judge": "How fast the guard judges",
}
LEGEND = """Ratios are the peer's time, or memory, over Hora's: above 1 Hora is ahead. "From" and "to" bound
the middle half of the rounds; of collectives the lowest and the highest of all sizes, each of which the aim
is for; of the guard's cost an interval of 95 %. "Held" says whether the aim is reached."""
QUICK = """**Quick figures**: of so few rounds that they only show that all works. `make bench` measures."""
WIDE = ("collectives", "scaling")


def fill(page: Path, results: Results, summary: Cells) -> None:
    """Put the figures into the page, and the plots into a folder of the page's name beside it."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for figures. Write the lines {BEGIN} and {END} into it.")
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    figures = "\n\n".join(sections(results, summary, folder))
    page.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")


def sections(results: Results, summary: Cells, folder: Path) -> Iterator[str]:
    if results.quick:
        yield QUICK
    yield _machine(next(iter(results.files.values()))["machine"])
    yield "## In one table\n\n" + LEGEND
    yield _markdown(summary)
    for benchmark in dict.fromkeys([*(part.benchmark for part in PARTS), *results.files]):
        title = TITLES.get(benchmark, benchmark.replace("_", " ").capitalize())
        yield f"## {title}"
        if benchmark in results.files:
            found = results.files[benchmark]
            yield f"```bash\n{found['command']}\n```"
            for name, plot in PLOTS.get(benchmark, {}).items():
                if plot(found["rows"], folder / f"{name}.svg"):
                    yield f"![{title}]({folder.name}/{name}.svg)"
            yield _markdown((wide_cells if benchmark in WIDE else long_cells)(found["rows"]))
            reasons = {name: reason.splitlines()[0] for name, reason in found["left_out"].items()}
            notes = found["notes"] if benchmark == "guard_cost" else {}
            lines = [f"- Left out: {name}: {reason}." for name, reason in reasons.items()]
            lines += [f"- {name}: {text}." for name, text in notes.items()]
            if lines:
                yield "\n".join(lines)
        missing = {part: why for part, why in results.missing.items() if part.benchmark == benchmark}
        if missing:
            yield "\n".join(f"- Not measured: {part.title}: {why}." for part, why in missing.items())


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
