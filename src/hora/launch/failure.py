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
from hora.launch import _record, _worker

__all__ = ["Failure", "Outcome", "judge", "parse_record", "read_record", "signal_name"]

SAME_MOMENT = 5.0
"""Seconds within which equal errors of all ranks are one error: imports take that long on a busy host."""

TAIL_LINES = 12
"""Lines of stderr shown for a rank that left no traceback."""

LONGEST = 300
"""Characters shown of such a line."""

UNTOLD = (_worker.__file__, "Extension modules: ")
"""Parts of faulthandler's output that say nothing about the fault."""

LONGEST_LINE = 2000
LONGEST_TEXT = 200
"""Characters of a line and lines of a traceback in the report; the log has all of it."""

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
    """

    rank: int
    code: int
    ended: float
    stop_sent: float | None = None
    record: dict[str, Any] | None = None
    tail: Sequence[str] = ()
    memory: str | None = None

    @property
    def failed(self) -> bool:
        """An exit code other than 0, or an exception, that is the rank's own doing."""
        return (self.code != 0 or self.record is not None) and not self.stopped

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
    """

    rank: int
    host: str
    exit_code: int
    summary: str
    report: str
    others: Sequence[str] = field(default_factory=tuple)


def judge(outcomes: Sequence[Outcome], run: RunDirectory) -> Failure | None:
    """The first failure among the ranks' ends; None when all ended well or were stopped.

    Args:
        outcomes: one per rank.
        run: for the paths of the logs in the report.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return None
    first = min(failed, key=lambda outcome: (outcome.echo, outcome.time, outcome.rank))
    host = socket.gethostname()
    same = _same_error(first, failed)
    everyone = len(same) == len(outcomes) > 1
    who = f"all {len(outcomes)} ranks" if everyone else f"rank {first.rank} of {len(outcomes)}"
    summary = f"{who} failed on {host}: {_how(first)}"
    others = (
        []
        if everyone
        else [_line(outcome, first, outcomes, same) for outcome in outcomes if outcome is not first]
    )
    parts = [f"hora: {summary}", *_indent(_details(first)), *_indent(others)]
    parts.append(f"  log: {_shown(run.log(first.rank))}")
    return Failure(
        rank=first.rank,
        host=host,
        exit_code=first.exit_code,
        summary=summary,
        report="\n".join(parts),
        others=tuple(others),
    )


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


def signal_name(number: int) -> str:
    """``SIGSEGV`` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_MEANING = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error; a full /dev/shm is a common cause",
    signal.SIGILL: "illegal instruction: built for another processor?",
    signal.SIGFPE: "arithmetic error in compiled code",
    signal.SIGABRT: "abort by compiled code",
    signal.SIGKILL: "killed from outside",
    signal.SIGTERM: "told to stop from outside",
    signal.SIGINT: "interrupted from outside",
    signal.SIGHUP: "hung up from outside",
    signal.SIGXCPU: "processor time limit",
    signal.SIGXFSZ: "file size limit",
}


def _how(outcome: Outcome) -> str:
    if outcome.record is not None and not outcome.record["exit"]:
        return f"{outcome.record['type'].rpartition('.')[2]}, exit code {outcome.exit_code}"
    if outcome.code < 0 and outcome.record is None:
        number = -outcome.code
        if number == signal.SIGKILL and outcome.memory:
            return f"SIGKILL, killed because memory ran out ({outcome.memory}), exit code {outcome.exit_code}"
        try:
            meaning = f" ({_MEANING[signal.Signals(number)]})"
        except (ValueError, KeyError):
            meaning = ""
        return f"{signal_name(number)}{meaning}, exit code {outcome.exit_code}"
    return f"exit code {outcome.exit_code}"


def _details(first: Outcome) -> list[str]:
    record = first.record
    lines: list[str] = []
    if record is None:
        told = [line[:LONGEST] for line in first.tail if not any(word in line for word in UNTOLD)]
        lines = told[-TAIL_LINES:]
        if lines:
            lines.insert(0, "its last lines on stderr:")
        if first.memory and first.code == -signal.SIGKILL:
            lines.append("Use a smaller micro-batch or fewer workers, or give the job more memory.")
    elif isinstance(record.get("hora"), dict):
        lines = [
            *str(record["hora"].get("what", "")).splitlines(),
            *str(record["hora"].get("fix", "")).splitlines(),
        ]
        lines += _where(record)
        lines.append(f"more: hora explain {record['hora'].get('slug', '')}")
    elif record["exit"]:
        code = record["message"]
        lines = [*_where(record)]
        if not re.fullmatch(r"-?\d+", code):
            lines.insert(0, code)
    else:
        lines = record["traceback"].rstrip().splitlines()
        if record["type"] == "ModuleNotFoundError" and "'horovod" in record["message"]:
            lines.append("Scripts written for horovod.torch run with: hora run --horovod -np 2 script.py")
    if first.memory and first.code != -signal.SIGKILL:
        lines.append(f"The kernel's out-of-memory killer ran during the job: {first.memory}.")
    return lines


def _where(record: dict[str, Any]) -> list[str]:
    where = record.get("where")
    if not isinstance(where, dict):
        return []
    return [f"at {where.get('file')}:{where.get('line')}: {where.get('code')}".rstrip(": ")]


def _line(outcome: Outcome, first: Outcome, outcomes: Sequence[Outcome], same: Sequence[Outcome]) -> str:
    who = f"rank {outcome.rank}: "
    if outcome in same:
        return who + "the same error"
    if outcome.failed and outcome.echo:
        return who + f"echo: connection to rank {_lost(outcome, first, outcomes)} lost"
    if outcome.stopped:
        if outcome.code == -signal.SIGKILL:
            return who + "stopped by hora (SIGKILL, it did not end on SIGTERM)"
        return who + "stopped by hora"
    if outcome.code == 0:
        return who + "ended by itself with exit code 0"
    text = f"ended by itself: {_how(outcome)}"
    if outcome.record is not None and not outcome.record["exit"] and outcome.record["message"].strip():
        text += f": {outcome.record['message'].strip().splitlines()[0][:200]}"
    return who + text


def _lost(outcome: Outcome, first: Outcome, outcomes: Sequence[Outcome]) -> int:
    named = re.search(r"\brank (\d+)", outcome.record["message"]) if outcome.record else None
    if named and int(named[1]) < len(outcomes) and int(named[1]) != outcome.rank:
        return int(named[1])
    return first.rank


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


def _indent(lines: Sequence[str]) -> list[str]:
    if len(lines) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        lines = [*lines[:half], f"... ({len(lines) - 2 * half:,} more lines in the log)", *lines[-half:]]
    return [f"  {_clipped(line)}".rstrip() for line in lines]


def _clipped(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE:,} more characters in the log)"


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
