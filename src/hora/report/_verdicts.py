"""The guard's verdicts on a run, from ``verdicts.jsonl``, as the report shows them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.core.pages import page
from hora.guard.verdict import KINDS
from hora.report._account import ranks_text
from hora.report._markdown import to_html
from hora.report._story import duration

__all__ = ["Finding", "explanations", "read_verdicts"]

INFORMATION = frozenset({"plan"})
"""Kinds that say what is, not what is wrong."""

MOST_TEXT = 20_000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One verdict in words, or a line that is none.

    Attributes:
        kind: its slug; empty for a line that could not be read.
        title: its headline.
        place: ranks and hosts, step, line of the script, when.
        call: the collective; empty when there is none.
        text: the paragraph, or the broken line as it stands in the file.
        advice: what to do; may be empty.
        alarm: whether something is wrong.
        time: seconds since 1970; NaN when it is not known.
    """

    kind: str
    title: str
    place: list[str]
    call: str
    text: str
    advice: str
    alarm: bool
    time: float


def read_verdicts(path: Path, *, started: float) -> tuple[list[Finding], str]:
    """What the file says, alarms first and each in the order of the file; and why it cannot be read.

    Args:
        path: ``verdicts.jsonl``; when it is not there, nothing was found.
        started: when the run started, seconds since 1970 or NaN.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path.name} cannot be read: {error.strerror}."
    found = [_finding(line, started) for line in lines if line.strip()]
    return sorted(found, key=lambda one: not one.alarm), ""


def explanations(found: list[Finding]) -> list[tuple[str, str, str]]:
    """For each kind among them that has a page: slug, headline and the page as HTML."""
    kinds = dict.fromkeys(one.kind for one in found if one.kind)
    return [(kind, KINDS.get(kind, kind), to_html(text)) for kind in kinds if (text := page(kind))]


def _finding(line: str, started: float) -> Finding:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return Finding(
            kind="",
            title="A line of verdicts.jsonl that is no verdict",
            place=[],
            call="",
            text=line[:MOST_TEXT],
            advice="The job may have ended while it was written.",
            alarm=True,
            time=math.nan,
        )
    kind: str = record["kind"]
    when = _number(record.get("time"))
    return Finding(
        kind=kind,
        title=KINDS.get(kind, kind),
        place=list(_place(record, when - started)),
        call=_text(record.get("call")),
        text=_text(record.get("text")),
        advice=_text(record.get("advice")),
        alarm=kind not in INFORMATION,
        time=when,
    )


def _place(record: dict[str, Any], after: float) -> list[str]:
    parts = []
    ranks = [rank for rank in _list(record.get("ranks")) if isinstance(rank, int) and 0 <= rank < 10**6]
    hosts = [_text(host) for host in _list(record.get("hosts"))]
    where = ranks_text(sorted(set(ranks))) if ranks else ""
    if hosts:
        shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")
        where = f"{where} on {shown}".lstrip()
    parts.append(where)
    step = record.get("step")
    if isinstance(step, int):
        parts.append(f"step {step:,}" if abs(step) < 10**15 else "")
    parts.append(_text(record.get("where")))
    if 0 <= after < 1e9:
        parts.append(f"{duration(after)} after the start")
    return [part for part in parts if part]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float:
    return (
        float(value) if isinstance(value, float) or (type(value) is int and abs(value) < 1e12) else math.nan
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)[:MOST_TEXT]
