"""Put the page together: charts and tables from the data, the layout from ``page.html.j2``."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.core.errors import MissingExtraError, RunDirectoryError
from hora.core.rundir import RunDirectory, replace_text
from hora.report import _story as story
from hora.report import _worlds as worlds
from hora.report._account import account
from hora.report._charts import Bar, Box, Curve, Rule, bar_chart, box_chart, line_chart
from hora.report._markdown import inline_code
from hora.report._planned import rows as planned_rows
from hora.report._read import Record, RunData, mapping, read, real
from hora.report._scale import Point, moving_average
from hora.report._verdicts import explanations, read_verdicts

__all__ = ["markdown_of", "write_report"]

MOST_ROWS = 300
"""Rows of one table; a configuration with more is not read but searched, in run.json."""

MOST_VERDICTS = 50

MOST_TIMELINE_MB = 200
"""Of all ranks. Larger timelines take their time: they are for ``hora trace``."""


def write_report(run: RunDirectory, *, most_timeline_mb: float = MOST_TIMELINE_MB) -> Path:
    """Write ``report.html`` into the run directory, from its files alone, and return its path.

    May be called at any time and again: the page is replaced in one step.

    Args:
        run: the run.
        most_timeline_mb: with a timeline above this, of all ranks together, the page does not show where the
            time went, which takes about 0.1 s per MB.

    Raises:
        MissingExtraError: jinja2 is not installed.
        RunDirectoryError: the directory cannot be written (DiskFullError: no space).
    """
    page = render(read(run), most_timeline_mb=most_timeline_mb)
    replace_text(run.report, page)
    return run.report


def render(data: RunData, *, most_timeline_mb: float = MOST_TIMELINE_MB) -> str:
    """The page as text."""
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise MissingExtraError(
            "The report needs jinja2, which is not installed.", fix="Run pip install 'hora[workloads]'."
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = lambda text: markupsafe.Markup(inline_code(text))
    verdicts, unreadable = read_verdicts(
        data.path / "verdicts.jsonl", started=real(data.about.get("start") or data.about.get("created"))
    )
    if unreadable:
        data.problems.append(unreadable)
    rows, unreadable = _worlds(data)
    if unreadable:
        data.problems.append(unreadable)
    explained = explanations(verdicts)
    first = story.first_failure(data)
    scaling = story.scaling(data)
    planned = planned_rows(data)
    page = environment.get_template("page.html.j2").render(
        style=markupsafe.Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8")),
        title=_title(data),
        run_name=data.path.name,
        run_path=str(data.path),
        created=_date(real(data.about.get("created"))),
        written=_date(time.time()),
        outcome=story.outcome(data),
        figures=story.figures(data),
        verdicts=verdicts[:MOST_VERDICTS],
        more_verdicts=max(0, len(verdicts) - MOST_VERDICTS),
        explanations=[(kind, title, markupsafe.Markup(text)) for kind, title, text in explained],
        explained={kind for kind, _, _ in explained},
        guarded=data.about.get("guard") in ("on", "strict"),
        failure=first,
        failure_is_verdict=first is not None and story.is_verdict(first) and bool(verdicts),
        other_failures=[one for one in data.failures if one is not first],
        training=[chart for chart in _training(data, markupsafe.Markup) if chart["svg"]],
        speed=[
            chart
            for chart in (
                *_speed(data, scaling, markupsafe.Markup),
                *_time(data, most_timeline_mb, markupsafe.Markup),
            )
            if chart["svg"]
        ],
        planned=planned,
        worlds=rows[:MOST_ROWS],
        more_worlds=max(0, len(rows) - MOST_ROWS),
        worlds_text=worlds.sentence(rows),
        epochs=_epoch_rows(data.evals),
        images=data.images,
        drawings=data.drawings,
        right=sum(image.right for image in data.images),
        tables=_tables(data),
        files=[(name, meaning, story.size_text(size)) for name, meaning, size in data.files],
        has=dict.fromkeys((name for name, _, _ in data.files), True),
        problems=data.problems,
    )
    # A surrogate from a lone \ud800 in a JSON file cannot be written as UTF-8.
    return page.encode("utf-8", "replace").decode("utf-8")


def markdown_of(run: RunDirectory) -> str:
    """The same in a few lines of Markdown, for a terminal: the outcome, key figures, verdicts and worlds."""
    data = read(run)
    outcome = story.outcome(data)
    lines = [
        f"# {_title(data)}",
        "",
        f"**{outcome.headline}**",
        *([outcome.more] if outcome.more else []),
        "",
    ]
    for figure in story.figures(data):
        more = f" ({figure.more})" if figure.more else ""
        lines.append(f"- {figure.name}: {figure.value} {figure.unit}".rstrip() + more)
    verdicts, unreadable = read_verdicts(
        data.path / "verdicts.jsonl", started=real(data.about.get("start") or data.about.get("created"))
    )
    for one in verdicts[:MOST_VERDICTS]:
        place = f" ({', '.join(one.place)})" if one.place else ""
        lines += [*([""] if one is verdicts[0] else []), f"- {one.title}{place}: {one.text}"]
    rows, malformed = _worlds(data)
    if rows:
        lines += ["", worlds.sentence(rows), "", worlds.markdown(rows)]
    lines += [f"\nLeft out: {problem}" for problem in [*data.problems, unreadable, malformed] if problem]
    return "\n".join(lines)


def _worlds(data: RunData) -> tuple[list[worlds.Row], str]:
    started = real(data.about.get("start") or data.about.get("created"))
    return worlds.read_worlds(
        data.path / "worlds.jsonl",
        started=started,
        ended=real(data.about.get("ended")),
        how=story.outcome(data).headline,
    )


def _title(data: RunData) -> str:
    summary = data.entry("summary")
    parts = [str(summary[key]) for key in ("workload", "profile") if isinstance(summary.get(key), str)]
    return ", ".join(parts) or data.path.name


def _training(data: RunData, markup: Any) -> Iterator[dict[str, Any]]:
    x_name = "epoch" if _has([*data.train, *data.evals], "epoch") else "step"
    loss = _points(data.train, x_name, "loss")
    smooth = len(loss) // 40
    curves = [Curve(name="train", points=loss, style="a", markers=len(loss) <= 30)]
    legend = [("a", "train")]
    if smooth >= 3:
        curves = [
            Curve(name="each record", points=loss, style="faint", hover=False),
            Curve(name="train", points=moving_average(loss, smooth), style="a"),
        ]
        legend = [("a", f"train, average of {smooth:,} records"), ("faint", "each record")]
    evals = _points(data.evals, x_name, "loss")
    if evals:
        curves.append(Curve(name="test", points=evals, style="b", markers=True))
        legend.append(("b", "test"))
    yield {
        "name": "Loss",
        "svg": markup(line_chart(curves, title="Loss", x_label=x_name, y_label="loss", log=True)),
        "legend": legend if len(legend) > 1 else [],
        "note": _not_finite(loss, x_name, "training loss") or _smoothing(data, evals),
    }
    accuracy = _points(data.evals, x_name, "accuracy")
    target = real(data.entry("summary").get("target"))
    if math.isnan(target):
        target = real(data.entry("config").get("target"))
    yield {
        "name": "Test accuracy",
        "svg": markup(
            line_chart(
                [Curve(name="test", points=accuracy, style="b", markers=True)],
                title="Test accuracy",
                x_label=x_name,
                y_label="top-1 accuracy",
                rules=[Rule(name="target", y=target)] if math.isfinite(target) else [],
            )
        ),
        "legend": [],
        "note": _not_finite(accuracy, x_name, "accuracy"),
    }
    for name, field, label in (
        ("Learning rate", "learning_rate", "learning rate"),
        ("Throughput of all workers", "rate", "samples/s"),
    ):
        points = _points(data.train, x_name, field)
        curve = Curve(name=label, points=points, style="a")
        yield {
            "name": name,
            "svg": markup(line_chart([curve], title=name, x_label=x_name, y_label=label, zero=True)),
            "legend": [],
            "note": "",
        }


def _speed(data: RunData, scaling: story.Scaling | None, markup: Any) -> Iterator[dict[str, Any]]:
    boxes = [
        Box(name=f"rank {rank}", levels=_levels(values))
        for rank, values in enumerate(data.rank_rates)
        if values
    ]
    yield {
        "name": "Throughput per rank",
        "svg": markup(box_chart(boxes, title="Throughput per rank", x_label="rank", y_label="samples/s")),
        "legend": [],
        "note": story.spread_sentence(data.rank_rates),
    }
    if scaling is None:
        return
    bars = [
        Bar(name="1 worker", value=scaling.one, style="c", rounds=scaling.one_rounds),
        Bar(name=f"{scaling.workers} workers", value=scaling.all, style="a", rounds=scaling.all_rounds),
        Bar(name="ideal", value=scaling.one * scaling.workers, style="faint"),
    ]
    dots = (
        " Dots are the single rounds of the calibration." if scaling.one_rounds or scaling.all_rounds else ""
    )
    yield {
        "name": f"Scaling factor {scaling.factor:.2f}",
        "svg": markup(bar_chart(bars, title="Scaling", unit="samples/s")),
        "legend": [],
        "note": scaling.sentence() + dots,
    }


def _time(data: RunData, most_mb: float, markup: Any) -> Iterator[dict[str, Any]]:
    """Where each rank's time went, from the timelines."""
    files = [file for file in (data.path / "events").glob("rank-*.jsonl") if file.is_file()]
    if not files or sum(file.stat().st_size for file in files) > most_mb * 2**20:
        return
    try:
        found = account(RunDirectory(data.path))
    except RunDirectoryError:  # files without an event
        return
    yield {
        "name": "Where the time went",
        "svg": markup(found.chart()),
        "legend": found.legend(),
        "note": " ".join(found.notes()),
    }


def _levels(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    ordered = sorted(values)

    def at(part: float) -> float:
        place = part * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.05), at(0.25), at(0.5), at(0.75), at(0.95)


def _points(records: Sequence[Record], x_name: str, field: str) -> list[Point]:
    """All records that have an x and the field, a number or not; none if no number is among them."""
    points = [
        (getattr(record, x_name), getattr(record, field)) for record in records if field not in record.missing
    ]
    points = [point for point in points if math.isfinite(point[0])]
    return points if any(math.isfinite(y) for _, y in points) else []


def _has(records: Sequence[Record], field: str) -> bool:
    return any(math.isfinite(getattr(record, field)) for record in records)


def _not_finite(points: Sequence[Point], x_name: str, what: str) -> str:
    bad = [x for x, y in points if not math.isfinite(y)]
    if not bad:
        return ""
    return (
        f"The {what} is not a finite number in {len(bad):,} of {len(points):,} records, "
        f"first at {x_name} {bad[0]:.4g}."
    )


def _smoothing(data: RunData, evals: Sequence[Point]) -> str:
    if not evals or not real(data.entry("config").get("label_smoothing")) > 0:
        return ""
    return "The training loss includes label smoothing, the test loss does not: they are not to be compared."


def _epoch_rows(evals: Sequence[Record]) -> list[tuple[str, ...]]:
    rows = evals if len(evals) <= 100 else [*evals[:: max(1, len(evals) // 99)], evals[-1]]
    return [
        (
            _cell(record.epoch, ".4g"),
            _cell(record.step, ",.0f"),
            story.duration(record.time) if 0 <= record.time < math.inf else "–",
            _cell(record.loss, ".4f"),
            _cell(record.accuracy, ".4f"),
        )
        for record in rows
    ]


def _cell(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _tables(data: RunData) -> list[tuple[str, list[tuple[str, str]]]]:
    named = [("Workload", "config"), ("World", "world"), ("Versions", "versions")]
    # run.json holds the world of rank 0, who wrote it; its own place among the ranks says nothing here.
    own = {"rank", "local_rank", "host_index"}
    tables = [(title, [row for row in _flat(data.entry(key)) if row[0] not in own]) for title, key in named]
    known = {"config", "world", "versions", "summary", "created", "start", "ended", "failure"}
    rest = {key: value for key, value in data.about.items() if key not in known}
    if isinstance(rest.get("command"), list):
        rest["command"] = shlex.join(map(str, rest["command"]))
    tables.insert(1, ("Job", list(_flat(rest))))
    return [(title, rows[:MOST_ROWS]) for title, rows in tables if rows]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        inner = mapping(value)
        if inner and prefix.count(".") < 8:
            yield from _flat(inner, f"{name}.")
        else:
            yield name, _plain(value)


def _plain(value: object) -> str:
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))[:2000]
    return str(value)[:2000]


def _date(seconds: float) -> str:
    if not 0 < seconds < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
