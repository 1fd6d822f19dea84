"""What a plan said, beside what happened: the report's section, from ``plan.json`` and the timeline."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hora.core.errors import UsageError
from hora.plan.text import time
from hora.report._read import RunData, mapping, real

__all__ = ["Row", "checked", "rows"]

Row = tuple[str, str, str, str]
"""What, what the plan said with its interval, what happened, and predicted over happened."""
FEWEST = 5
WARM = 0.2
"""Share of the first steps that does not count, as in a profile."""


def checked(path: Path) -> str:
    """The text of a plan's file, as ``hora plan --json`` prints it.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    fix = "Write hora plan ... --json > plan.json, and give that file."
    try:
        text = path.read_text(encoding="utf-8")
        step = json.loads(text)["step"]
        if not 0 < float(step["low"]) <= float(step["value"]) <= float(step["high"]):
            raise ValueError("its step is no interval")
    except OSError as error:
        raise UsageError(f"--plan {path}: it cannot be read ({error.strerror}).", fix=fix) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--plan {path}: it is no plan ({error}).", fix=fix) from error
    return text


def rows(data: RunData) -> list[Row]:
    """One row for each figure that the plan gave, first what it was made for; empty without a plan."""
    path = data.path / "plan.json"
    if not path.is_file():
        return []
    try:
        plan = mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        data.problems.append("plan.json cannot be read.")
        return []
    steps, batch = _steps(data)
    found = [
        _same("workers", plan.get("gpus"), data.entry("world").get("size")),
        _same("global batch", plan.get("batch"), batch or None),
    ]
    found.append(_row("time of a step", plan.get("step"), steps, time))
    rate = batch / steps if batch and steps else None
    found.append(_row("samples per second", plan.get("rate"), rate, lambda value: f"{value:,.4g}"))
    trained = real(data.entry("summary").get("time_to_train"))
    found.append(
        _row("time to train", plan.get("time_to_train"), trained if math.isfinite(trained) else None, time)
    )
    return [row for row in found if row is not None]


def _same(what: str, said: object, had: object) -> Row | None:
    """What a plan was made for, and what ran: other times are no error of the plan where these differ."""
    planned, happened = real(said), real(had)
    if not math.isfinite(planned):
        return None
    if not math.isfinite(happened):
        return what, f"{planned:,.0f}", "not recorded", ""
    told = "as planned" if planned == happened else "not as planned: the times below are of another job"
    return what, f"{planned:,.0f}", f"{happened:,.0f}", told


def _row(what: str, interval: object, happened: float | None, show: Any) -> Row | None:
    said: Mapping[str, Any] = mapping(interval)
    values = [real(said.get(name)) for name in ("low", "value", "high")]
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    low, value, high = values
    text = f"{show(value)} ({show(low)} to {show(high)})"
    if happened is None or happened <= 0:
        return what, text, "not recorded", ""
    inside = "inside" if low <= happened <= high else "outside"
    return what, text, show(happened), f"{value / happened - 1:+.1%}, {inside} the interval"


def _steps(data: RunData) -> tuple[float | None, float]:
    """Median seconds of rank 0's steps, and samples of each (0 where not recorded)."""
    seconds: list[float] = []
    batch = 0.0
    try:
        lines = (data.path / "events" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None, 0.0
    for line in lines:
        try:
            event = mapping(json.loads(line))
        except ValueError:
            continue  # the last line of a rank that was killed
        if event.get("lane") == "steps":
            seconds.append(real(event.get("stop")) - real(event.get("start")))
        elif event.get("name") == "plan":
            about = mapping(event.get("args"))
            samples = real(about.get("global_batch")) * real(about.get("backward_passes"))
            batch = samples if math.isfinite(samples) else 0.0
    seconds = [value for value in seconds if math.isfinite(value)]
    if len(seconds) < FEWEST:
        return None, batch
    return statistics.median(seconds[int(WARM * len(seconds)) :]), batch
