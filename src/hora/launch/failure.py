"""Which rank failed first, and the one report about it.

When one rank of a job dies, all others lose a connection and fail too, often in the same millisecond and
with longer tracebacks. So time alone does not tell who was first: what a rank says about *another*
rank's end (an echo) never wins over a rank that died by itself.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.core.rundir import RunDirectory
from hora.guard.judge import ranks_text
from hora.guard.verdict import Verdict
from hora.launch import _record, _report

__all__ = ["Failure", "Outcome", "judge", "parse_record", "read_record", "what_happened"]

SAME_MOMENT = 5.0
"""Seconds within which equal errors of all ranks are one error: imports take that long on a busy host."""

ABORTS = (signal.SIGABRT,)
"""Signals by which C++ code ends after an exception of its own, which may be an echo."""


@dataclass(kw_only=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: which one.
        code: as of ``subprocess``: the exit code, or minus the signal's number.
        ended: when, ``time.time()`` in seconds.
        stop_sent: when the launcher told it to stop; None: it ended by itself.
        record: its failure file, when it left one.
        tail: its last lines on stderr.
        memory: why the out-of-memory killer ran during the job, when it did.
        suspended: whether it told that it stops at a step edge because it was asked to, and did so.
        log: number of its log, where that is not its rank: in an elastic job a worker keeps it.
        host: where it ran; None: on this host.
        lost: why nobody knows how it ended: its host was lost. None: it is known.
    """

    rank: int
    code: int
    ended: float
    stop_sent: float | None = None
    record: dict[str, Any] | None = None
    tail: Sequence[str] = ()
    memory: str | None = None
    suspended: bool = False
    log: int | None = None
    host: str | None = None
    lost: str | None = None

    @property
    def well(self) -> bool:
        """Ended with 0, or at a step edge because it was asked to."""
        return (self.code == 0 and self.record is None) or self.suspended

    @property
    def failed(self) -> bool:
        """An exit code other than 0, or an exception, that is the rank's own doing."""
        return not self.well and not self.stopped

    @property
    def stopped(self) -> bool:
        """Ended because the launcher said so; an exception recorded before that is its own doing."""
        if self.stop_sent is None:
            return False
        return self.record is None or self.record["time"] >= self.stop_sent

    @property
    def time(self) -> float:
        """When it failed, ``time.time()`` in seconds: its exception if it recorded one, else its end."""
        return float(self.record["time"]) if self.record else self.ended

    @property
    def echo(self) -> bool:
        """Whether it failed because another rank had gone: a lost connection, say."""
        if self.record is not None:
            return bool(self.record["echo"])
        return -self.code in ABORTS and any(_record.ECHO_TEXT.search(line) for line in self.tail)

    @property
    def told(self) -> bool:
        """Whether it ended by the error that the guard had it raise, also out of C++ that had called Hora."""
        if self.record is None:
            return False
        return str(self.record["type"]).endswith("VerdictError") or "callback: VerdictError:" in str(
            self.record["message"]
        )

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 and the number for a signal."""
        if self.record is not None and (self.stop_sent is not None or self.code == 0):
            code = self.record.get("code")  # it had failed, and then hung on its way out or hid its exit code
            return code if isinstance(code, int) and 0 < code < 256 else 1
        return 128 - self.code if self.code < 0 else self.code

    @property
    def error(self) -> tuple[str, str] | None:
        """Kind and message of its exception, free of what differs between ranks."""
        if self.record is None:
            return None
        return self.record["type"], re.sub(r"\brank \d+", "rank N", self.record["message"])


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a job.

    Attributes:
        rank: the first failing rank.
        host: where it ran.
        exit_code: the job's exit code, 1 to 255.
        summary: one line: which rank, and how.
        report: the whole report as text.
        others: how each other rank ended, one line each.
        verdict: what the guard found, where that ended the job rather than a rank's own failure.
    """

    rank: int
    host: str
    exit_code: int
    summary: str
    report: str
    others: Sequence[str] = field(default_factory=tuple)
    verdict: Verdict | None = None


def judge(
    outcomes: Sequence[Outcome],
    run: RunDirectory,
    *,
    verdict: Verdict | None = None,
    size: int | None = None,
) -> Failure | None:
    """The first failure among the ranks' ends; None when all ended well or were stopped.

    Args:
        outcomes: one per rank.
        run: for the paths of the logs in the report.
        verdict: the one by which the guard stopped the job.
        size: number of ranks, where not all have an outcome that tells anything.
    """
    if verdict is not None and verdict.kind != "rank-failed":
        return _by_verdict(verdict, outcomes, run)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return None
    first = min(failed, key=lambda outcome: (outcome.told, outcome.echo, outcome.time, outcome.rank))
    host = first.host or socket.gethostname()
    same = _same_error(first, failed)
    everyone = len(same) == len(outcomes) > 1
    who = f"all {len(outcomes)} ranks" if everyone else f"rank {first.rank} of {size or len(outcomes)}"
    summary = f"{who} failed on {host}: {_report.how(first)}"
    others = []
    for outcome in outcomes:
        if outcome is not first and not everyone:
            text = _report.line(outcome, first.rank, size=len(outcomes), same=outcome in same)
            others.append(f"rank {outcome.rank}: {text}")
    parts = [f"hora: {summary}", *_report.indent(_report.details(first)), *_report.indent(others)]
    parts.append(f"  log: {_report.shown(_log(first, run))}")
    return Failure(
        rank=first.rank,
        host=host,
        exit_code=first.exit_code,
        summary=summary,
        report="\n".join(parts),
        others=tuple(others),
    )


def _by_verdict(verdict: Verdict, outcomes: Sequence[Outcome], run: RunDirectory) -> Failure:
    """A short report: the verdict itself was shown when it was found."""
    named = verdict.ranks[0] if verdict.ranks else 0
    ends: dict[str, list[int]] = {}
    for outcome in outcomes:
        text = _report.line(outcome, named, size=len(outcomes), same=False)
        ends.setdefault(text, []).append(outcome.rank)
    others = [f"{ranks_text(ranks)}: {text}" for text, ranks in ends.items()]
    own = [outcome for outcome in outcomes if outcome.failed and not outcome.told and not outcome.echo]
    told = [outcome.rank for outcome in outcomes if outcome.told]
    summary = f"job stopped by the verdict {verdict.kind}"
    parts = [f"hora: {summary} (above)", *_report.indent(others)]
    log = next((_log(outcome, run) for outcome in outcomes if outcome.rank == named), run.log(named))
    return Failure(
        rank=told[0] if told else named,
        host=socket.gethostname(),
        exit_code=min(own, key=lambda outcome: outcome.time).exit_code if own else 1,
        summary=summary,
        report="\n".join([*parts, f"  log: {_report.shown(log)}"]),
        others=tuple(others),
        verdict=verdict,
    )


def _log(outcome: Outcome, run: RunDirectory) -> Path:
    return run.log(outcome.rank if outcome.log is None else outcome.log)


def what_happened(outcome: Outcome) -> dict[str, Any]:
    """A failed rank's error for the other ranks: ``error``, ``message``, ``traceback`` and ``where``."""
    record = outcome.record
    if record is None:
        error, meaning = _report.death(outcome)
        tail = "\n".join(_report.details(outcome))
        return {"error": error, "message": meaning, "traceback": tail, "where": None}
    where = record.get("where")
    message = record["message"]
    if record["exit"]:
        numeric = re.fullmatch(r"-?\d+", message) is not None
        error, message = f"exit code {outcome.exit_code}", "" if numeric else message
    else:
        error = record["type"].rpartition(".")[2]
    return {
        "error": error,
        "message": message,
        "traceback": "" if record["exit"] else record["traceback"],
        "where": f"{where.get('file')}:{where.get('line')}" if isinstance(where, dict) else None,
    }


def read_record(path: Path) -> dict[str, Any] | None:
    """A rank's failure file; None when it left none, or none that can be read."""
    try:
        return parse_record(path.read_text(errors="replace"))
    except OSError:
        return None


def parse_record(text: str) -> dict[str, Any] | None:
    """A failure record, if it is one: any program can write into the run directory."""
    try:
        record: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    wanted: dict[str, Any] = {
        "time": (int, float),
        "type": str,
        "message": str,
        "traceback": str,
        "echo": bool,
        "exit": bool,
    }
    if not isinstance(record, dict) or not all(
        isinstance(record.get(key), kind) for key, kind in wanted.items()
    ):
        return None
    return record


def _same_error(first: Outcome, failed: Sequence[Outcome]) -> list[Outcome]:
    return [
        outcome
        for outcome in failed
        if first.error is not None
        and not first.echo
        and outcome.error == first.error
        and outcome.code == first.code
        and abs(outcome.time - first.time) <= SAME_MOMENT
    ]
