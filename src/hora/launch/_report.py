"""The words of a failure report: what is said about how a rank ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hora.launch import _worker

if TYPE_CHECKING:
    from hora.launch.failure import Outcome

__all__ = ["death", "details", "how", "indent", "line", "shown", "signal_name"]

TAIL_LINES = 12
"""Lines of stderr shown for a rank that left no traceback."""

LONGEST = 300
"""Characters shown of such a line."""

UNTOLD = (_worker.__file__, "Extension modules: ")
"""Parts of faulthandler's output that say nothing about the fault."""

LONGEST_LINE = 2000
LONGEST_TEXT = 200
"""Characters of a line and lines of a traceback in the report; the log has all of it."""

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


def how(outcome: Outcome) -> str:
    """How a rank ended by itself, in one phrase."""
    if outcome.lost is not None:
        return outcome.lost
    if outcome.record is not None and not outcome.record["exit"]:
        return f"{outcome.record['type'].rpartition('.')[2]}, exit code {outcome.exit_code}"
    if outcome.code < 0 and outcome.record is None:
        name, meaning = death(outcome)
        if meaning:
            name += f", {meaning}" if outcome.memory and -outcome.code == signal.SIGKILL else f" ({meaning})"
        return f"{name}, exit code {outcome.exit_code}"
    return f"exit code {outcome.exit_code}"


def death(outcome: Outcome) -> tuple[str, str]:
    """The end of a rank that left no exception: its signal or exit code, and what that means."""
    if outcome.lost is not None:
        return outcome.lost, ""
    if outcome.code >= 0:
        return f"exit code {outcome.exit_code}", ""
    number = -outcome.code
    if number == signal.SIGKILL and outcome.memory:
        return "SIGKILL", f"killed because memory ran out ({outcome.memory})"
    try:
        return signal_name(number), _MEANING[signal.Signals(number)]
    except (ValueError, KeyError):
        return signal_name(number), ""


def details(first: Outcome) -> list[str]:
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


def line(outcome: Outcome, first: int, *, size: int, same: bool) -> str:
    """How a rank ended, beside the failure of the rank ``first``."""
    if same:
        return "the same error"
    if outcome.told:
        return "told by the guard, and ended"
    if outcome.failed and outcome.echo:
        return f"echo: connection to rank {_lost(outcome, first, size)} lost"
    if outcome.stopped:
        if outcome.code == -signal.SIGKILL:
            return "stopped by hora (SIGKILL, it did not end on SIGTERM)"
        return "stopped by hora"
    if outcome.suspended:
        return "stopped at a step edge, as asked"
    if outcome.code == 0 and outcome.record is None:
        return "ended by itself with exit code 0"
    text = f"ended by itself: {how(outcome)}"
    if outcome.record is not None and not outcome.record["exit"] and outcome.record["message"].strip():
        text += f": {outcome.record['message'].strip().splitlines()[0][:200]}"
    return text


def _lost(outcome: Outcome, first: int, size: int) -> int:
    named = re.search(r"\brank (\d+)", outcome.record["message"]) if outcome.record else None
    if named and int(named[1]) < size and int(named[1]) != outcome.rank:
        return int(named[1])
    return first


def indent(lines: Sequence[str]) -> list[str]:
    if len(lines) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        lines = [*lines[:half], f"... ({len(lines) - 2 * half:,} more lines in the log)", *lines[-half:]]
    return [f"  {_clipped(line)}".rstrip() for line in lines]


def _clipped(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE:,} more characters in the log)"


def shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def signal_name(number: int) -> str:
    """``SIGSEGV`` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
