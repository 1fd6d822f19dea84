"""A study's table and plot, from the results that are there: on the console, as Markdown, SVG and a page."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from html import escape

from hora.core.plural import plural
from hora.core.rundir import replace_text
from hora.report import STYLE, Curve, line_chart
from hora.workloads.study.directory import Result, StudyDirectory
from hora.workloads.study.plan import METHODS, Plan

__all__ = ["rows", "text_table", "write_page"]

STYLES = {"fixed": "faint", "linear": "c", "warmup": "b", "lars": "a"}


def rows(plan: Plan, results: Sequence[Result]) -> list[list[str]]:
    """The head, and a row for each global batch: accuracy by method, mean and range over the seeds."""
    table = [["global batch", "steps", *(METHODS[name].title for name in plan.methods)]]
    for batch in sorted(plan.batches):
        of_batch = [result for result in results if result.cell.batch == batch]
        steps = str(max((result.steps for result in of_batch), default="-"))
        table.append([f"{batch:,}", steps, *(_cell(of_batch, name) for name in plan.methods)])
    return table


def text_table(plan: Plan, results: Sequence[Result]) -> str:
    """The table for a console."""
    table = rows(plan, results)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table
    )


def write_page(directory: StudyDirectory, plan: Plan) -> None:
    """Write the study's page, plot and table, from what is there; each is replaced in one step.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    results = directory.results()
    plot = _plot(plan, results)
    table = rows(plan, results)
    head, *body = table
    lines = [head, ["---:"] * len(head), *body]
    replace_text(
        directory.table, "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{_about(plan)}\n"
    )
    if plot:
        replace_text(directory.plot, _alone(plot, plan))
    cells = len([cell for cell in plan.cells() if cell in {result.cell for result in results}])
    about = f"{escape(_about(plan))} {cells} of {len(plan.cells())} trainings are done."
    figures = f"<figure><figcaption>{_legend(plan)}</figcaption>{plot}</figure>{_losses(plan, results)}"
    sections = {
        "Accuracy": f"<div class='charts'>{figures}</div>",
        "Table": _html(table),
        "Each training": _html(_all(results)),
    }
    text = "".join(f"<section><h2>{title}</h2>{part}</section>" for title, part in sections.items())
    replace_text(directory.page, _PAGE.format(style=STYLE, about=about, sections=text))


_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Study of the global batch</title><style>{style}</style></head>
<body><main>
<header><p class="over">Hora study</p><h1>Accuracy by global batch</h1><p class="more">{about}</p></header>
{sections}
</main></body></html>
"""


def _plot(plan: Plan, results: Sequence[Result]) -> str:
    curves = [
        Curve(name=METHODS[name].title, points=points, style=STYLES[name], markers=True)
        for name in plan.methods
        if (points := _points(plan, results, name))
    ]
    return line_chart(
        curves,
        title="Accuracy by global batch",
        x_label=f"doublings of the global batch (0: {min(plan.batches):,} samples)",
        y_label="top-1 accuracy on test images",
    )


def _points(plan: Plan, results: Sequence[Result], method: str) -> list[tuple[float, float]]:
    found = []
    for batch in sorted(plan.batches):
        values = [r.accuracy for r in results if r.cell.method == method and r.cell.batch == batch]
        if values:
            found.append((math.log2(batch / min(plan.batches)), statistics.fmean(values)))
    return found


def _losses(plan: Plan, results: Sequence[Result]) -> str:
    """The training loss of the largest global batch."""
    largest = [result for result in results if result.cell.batch == max(plan.batches)]
    curves = []
    for name in plan.methods:
        of_method = [result for result in largest if result.cell.method == name]
        if of_method:
            losses = of_method[0].losses
            points = [
                (float(epoch), loss) for epoch, loss in enumerate(losses, start=1) if math.isfinite(loss)
            ]
            curves.append(Curve(name=METHODS[name].title, points=points, style=STYLES[name], markers=True))
    chart = line_chart(
        curves,
        title=f"Training loss, {max(plan.batches):,} samples per step",
        x_label="epoch",
        y_label="loss",
        log=True,
    )
    return chart and f"<figure><figcaption><h3>Loss of the largest batch</h3></figcaption>{chart}</figure>"


def _all(results: Sequence[Result]) -> list[list[str]]:
    table = [["method", "batch", "seed", "accuracy", "last loss", "steps", "peak rate", "noise scale", "s"]]
    for result in sorted(results, key=lambda each: (each.cell.batch, each.cell.method, each.cell.seed)):
        cell = result.cell
        noise = "-" if result.noise_scale is None else f"{result.noise_scale:,.0f}"
        table.append(
            [
                METHODS[cell.method].title,
                f"{cell.batch:,}",
                str(cell.seed),
                f"{result.accuracy:.4f}",
                f"{result.losses[-1]:.4f}" if result.finite else "not finite",
                str(result.steps),
                f"{result.lr:.4g}",
                noise,
                f"{result.seconds:.0f}",
            ]
        )
    return table


def _cell(results: Sequence[Result], method: str) -> str:
    values = [result.accuracy for result in results if result.cell.method == method]
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _about(plan: Plan) -> str:
    seeds = ", ".join(map(str, plan.seeds))
    return (
        f"ResNet, profile {plan.profile}, {plan.epochs} epochs of the same images for each global batch, "
        f"micro-batches of {plan.micro_batch}, {plan.warmup_epochs:g} of the epochs warm-up; "
        f"{plural(len(plan.seeds), 'seed')} {seeds}."
    )


def _legend(plan: Plan) -> str:
    marks = "".join(
        f"<li><span class='swatch {STYLES[name]}'></span>{escape(METHODS[name].title)}</li>"
        for name in plan.methods
    )
    return f"<ul class='legend'>{marks}</ul>"


def _alone(plot: str, plan: Plan) -> str:
    """The plot as a file of its own, with its style and legend in it."""
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', plot)[0])
    parts = [f"<style>{STYLE}</style>"]
    for number, name in enumerate(plan.methods):
        y = height + 18 * (number + 1)
        parts.append(f'<path class="curve {STYLES[name]}" d="M54 {y}h24"/>')
        parts.append(f'<text class="tick" x="86" y="{y + 4}">{escape(METHODS[name].title)}</text>')
    whole = height + 18 * len(plan.methods) + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}"'
    opening, rest = plot.split(">", 1)
    return re.sub(r'<svg viewBox="[^"]*"', head, opening) + ">" + "".join(parts) + rest


def _html(table: Sequence[Sequence[str]]) -> str:
    """Its first column holds words, or numbers like the others."""
    left = not table[-1][0].replace(",", "").isdigit()

    def line(cells: Sequence[str], tag: str) -> str:
        marks = ["" if left and not place else " class=number" for place in range(len(cells))]
        pairs = zip(cells, marks, strict=True)
        return f"<tr>{''.join(f'<{tag}{mark}>{escape(cell)}</{tag}>' for cell, mark in pairs)}</tr>"

    head, *body = table
    lines = [line(head, "th"), *(line(cells, "td") for cells in body)]
    return f"<div class='scroll'><table>{''.join(lines)}</table></div>"
