"""The worlds of an elastic job, from ``worlds.jsonl``: who took part, for how long, and why it ended."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.core.plural import plural
from hora.report._story import duration

__all__ = ["Row", "markdown", "read_worlds", "sentence"]

HEADINGS = (
    "World",
    "Began",
    "Lasted",
    "Workers",
    "Who, by rank",
    "Commits",
    "Why it ended",
    "Steps repeated",
)

MOST_NAMED = 16
"""Workers that are named; of more the first and the last are."""

_PLACE = re.compile(r"^worker (\d+)(?: \(rank \d+\))? has failed: ")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One world in words.

    Attributes:
        number: of the world.
        began: when, after the start of the run.
        lasted: how long.
        size: number of workers.
        workers: their numbers, by rank; one that comes for the first time is marked by ``+``.
        commits: commits that had been made when it began.
        ended: why it ended.
        repeated: steps that were made again because of that; empty where none could be.
        failed: whether a worker was lost.
    """

    number: str
    began: str
    lasted: str
    size: str
    workers: str
    commits: str
    ended: str
    repeated: str
    failed: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """Its columns, in the order of ``HEADINGS``."""
        return (
            *(self.number, self.began, self.lasted, self.size),
            *(self.workers, self.commits, self.ended, self.repeated),
        )


def read_worlds(path: Path, *, started: float, ended: float, how: str) -> tuple[list[Row], str]:
    """What the file says, in its order; and what of it could not be read.

    Args:
        path: ``worlds.jsonl``; where it is not there, the job was not elastic.
        started: when the run started, seconds since 1970 or NaN.
        ended: when it ended; NaN when that is not known.
        how: how it ended, which is how its last world did.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path.name} cannot be read: {error.strerror}."
    read = [_record(line) for line in lines if line.strip()]
    records = [record for record in read if record is not None]
    lost = len(read) - len(records)
    problem = f"{path.name}: {lost:,} malformed {plural(lost, 'line')} left out." if lost else ""
    known: set[int] = set()
    rows = []
    for record, following in itertools.zip_longest(records, records[1:]):
        rows.append(_row(record, following, known, started=started, ended=ended, how=how))
        known.update(record["workers"])
    return rows, problem


def sentence(rows: Sequence[Row]) -> str:
    """The table in a line."""
    lost = sum(row.failed for row in rows)
    again = sum(int(row.repeated) for row in rows if row.repeated.isdecimal())
    worlds = f"{len(rows):,} {plural(len(rows), 'world')}"
    text = f"{worlds}; workers were lost {lost:,} {plural(lost, 'time')}"
    return f"{text}, and {again:,} {plural(again, 'step was', many='steps were')} made again."


def markdown(rows: Sequence[Row]) -> str:
    """The table for a terminal, or a page in Markdown."""
    lines = [HEADINGS, tuple("-" * len(name) for name in HEADINGS), *(row.cells for row in rows)]
    escaped = [[cell.replace("\n", " ").replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    escaped[1] = ["-" * width for width in widths]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in escaped)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("workers"), list):
        return None
    numbers = [number for number in record["workers"] if type(number) is int and 0 <= number < 10**9]
    return {**record, "workers": numbers}


def _row(
    record: dict[str, Any],
    following: dict[str, Any] | None,
    known: set[int],
    *,
    started: float,
    ended: float,
    how: str,
) -> Row:
    began, until = _time(record), ended if following is None else _time(following)
    reason = None if following is None else following.get("reason")
    workers = [f"{'' if number in known or not known else '+'}{number}" for number in record["workers"]]
    if len(workers) > MOST_NAMED:
        workers = [*workers[: MOST_NAMED // 2], "…", *workers[-MOST_NAMED // 2 :]]
    return Row(
        number=_whole(record.get("number")),
        began=_span(began - started),
        lasted=_span(until - began),
        size=str(len(record["workers"])),
        workers=", ".join(workers),
        commits=_whole(record.get("commits")),
        ended=how if following is None else _why(reason, record, following),
        repeated="" if reason is None or following is None else _whole(following.get("repeats")),
        failed=reason is not None,
    )


def _why(reason: object, record: dict[str, Any], following: dict[str, Any]) -> str:
    """Why one world was followed by another."""
    if reason is not None:
        return _PLACE.sub(r"worker \1 failed: ", str(reason)[:500])
    before, after = set(record["workers"]), set(following["workers"])
    parts = []
    if after - before:
        parts.append(f"{_named(after - before)} taken in")
    if before - after:
        parts.append(f"{_named(before - after)} sent away")
    return "; ".join(parts) or "the workers met anew"


def _named(numbers: set[int]) -> str:
    several = len(numbers) > 1
    return f"worker{'s' * several} {', '.join(map(str, sorted(numbers)[:MOST_NAMED]))}"


def _time(record: dict[str, Any]) -> float:
    value = record.get("time")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        return math.nan
    return float(value)


def _span(seconds: float) -> str:
    return duration(seconds) if 0 <= seconds < 1e9 else "–"


def _whole(value: object) -> str:
    return str(value) if type(value) is int and 0 <= value < 10**12 else "–"
