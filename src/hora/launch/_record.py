"""What a rank says about the exception that it ends with.

Loaded by path when a rank fails, by a program that must not import anything else of Hora (see
``_worker.py``), and by the launcher, which judges the same texts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["ECHO_TEXT", "describe", "looks_like_echo", "shortened"]

ECHO_TYPES = (
    "ConnectionResetError",
    "BrokenPipeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
)

TENSORFLOW_ERRORS = ("UnavailableError", "UnknownError", "CancelledError")
"""What an operation of TensorFlow raises for a lost connection, and whatever else in a graph."""

CONNECTION_ERRORS = ("ConnectionError", "ConnectionRefusedError", "ConnectionAbortedError")

ECHO_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)( by)?( peer)?"
    r"|broken pipe|socket closed|connection to rank \d+ lost"
    r"|failed to recv, got 0 bytes|recvvalue failed|pair closure|read timeout"
    r"|callback: DistBackendError"  # out of C++ that had called an engine of Hora's
    r"|collective ops is aborted|the collective was given up|connection lost"
    r"|ncclremoteerror|remote process exited|(nccl communicator|the group) was aborted|ncclsystemerror",
    re.IGNORECASE,
)
"""What Gloo, NCCL, torch's TCPStore and the socket layer say when a peer has gone."""

LOADER = "_MultiProcessingDataLoaderIter"
"""The class of torch that talks with loader workers."""

WORKER_TRACEBACK = "\nOriginal Traceback (most recent call last):\n"
"""What torch writes between the error of a loader worker and its traceback."""

DYING = 1.0
"""Seconds in which a loader worker that has hung up ends; its connections close before that."""


def looks_like_echo(kind: str, message: str) -> bool:
    """Whether an exception is what a rank sees of *another* rank's end.

    Args:
        kind: the exception's class name.
        message: its text. For exceptions of general classes the text alone decides.
    """
    general = kind in ("RuntimeError", "Broken", "OSError", *CONNECTION_ERRORS, *TENSORFLOW_ERRORS)
    # JAX raises one of the two when Gloo has lost a rank, as it happens.
    of_jax = kind in ("JaxRuntimeError", "ValueError") and "Gloo" in message
    return kind in ECHO_TYPES or ((general or of_jax) and ECHO_TEXT.search(message) is not None)


def describe(error: BaseException) -> dict[str, Any]:
    """Kind, message, traceback without our own frames, the user's line, and whether it is an echo."""
    import traceback

    details = traceback.TracebackException.from_exception(error)
    frames = list(traceback.extract_tb(error.__traceback__))
    _strip(details, set())
    kind = type(error).__name__
    if type(error).__module__ not in ("builtins", "__main__"):
        kind = f"{type(error).__module__}.{kind}"
    lost, text = _lost_loader(error), _text(error)
    return {
        "type": kind,
        "message": f"{lost} {text}".rstrip() if lost else text,
        "traceback": "".join(details.format()) + (f"{lost}\n" if lost else ""),
        "where": _own_line([*frames, *_frames_in(text)]),
        "hora": _hora_parts(error),
        "echo": not lost and _is_echo(error),
        "exit": isinstance(error, SystemExit),
        "code": error.code & 0xFF if isinstance(error, SystemExit) and isinstance(error.code, int) else 1,
    }


def _frames_in(text: str) -> list[Any]:
    """The frames of a loader worker: torch raises its error again here, with its traceback in the text."""
    import traceback

    inner = text.partition(WORKER_TRACEBACK)[2]
    found = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', inner, re.MULTILINE)
    return [traceback.FrameSummary(name, int(line), function) for name, line, function in found]


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """As much of a record as a pipe takes in one piece (PIPE_BUF, 4096 bytes on Linux)."""
    head, tail = (record["traceback"][:600], record["traceback"][-900:])
    whole = len(record["traceback"]) <= 1500
    return record | {
        "message": record["message"][:300],
        "traceback": record["traceback"] if whole else f"{head} ...\n... {tail}",
        "where": None,
        "hora": record["hora"] and {key: text[:300] for key, text in record["hora"].items()},
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return "(its text cannot be shown: str() of it raises)"


def _hora_parts(error: BaseException) -> dict[str, str] | None:
    errors = sys.modules.get("hora.core.errors")
    if errors is None or not isinstance(error, errors.HoraError):
        return None
    return {"what": str(error.what), "fix": str(error.fix), "slug": str(error.slug)}


def _is_echo(error: BaseException) -> bool:
    seen = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        looks = looks_like_echo(type(current).__name__, _text(current)) and not _of_a_child(current)
        if getattr(current, "echo", False) is True or looks:
            return True
        # `raise X from echo` is an echo; so is the sys.exit(1) of a handler that caught one.
        current = current.__cause__ or (current.__context__ if isinstance(current, SystemExit) else None)
    return False


def _of_a_child(error: BaseException) -> bool:
    """Whether a connection was lost to a process that this rank has started, as to a loader worker."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and f"{os.sep}multiprocessing{os.sep}" in trace.tb_frame.f_code.co_filename


def _lost_loader(error: BaseException) -> str:
    """Which loader worker has ended, if that is what an error in torch's data loader comes from."""
    try:
        workers = [worker for loader in _loaders(error) for worker in loader._workers]
        if workers and _of_a_child(error):
            from multiprocessing.connection import wait

            wait([worker.sentinel for worker in workers], DYING)
        return " ".join(_end(worker) for worker in workers if worker.exitcode)
    except Exception as problem:  # noqa: BLE001 - the failure itself must get through
        return f"(Its loader workers cannot be looked at: {type(problem).__name__}.)"


def _end(worker: Any) -> str:
    import signal

    who = f"Loader worker (pid {worker.pid}) of rank {os.environ.get('HORA_RANK', '?')}"
    if worker.exitcode > 0:
        return f"{who} ended with exit code {worker.exitcode}."
    number = -worker.exitcode
    names = {one.value: one.name for one in signal.Signals}
    memory = " The kernel does so when memory runs out." if number == signal.SIGKILL else ""
    return f"{who} was killed by {names.get(number, f'signal {number}')}.{memory}"


def _loaders(error: BaseException) -> Iterator[Any]:
    """The data loaders in whose methods an error came up."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace = current.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if id(owner) not in seen and any(kind.__name__ == LOADER for kind in type(owner).__mro__):
                seen.add(id(owner))
                yield owner
            trace = trace.tb_next
        current = current.__cause__ or current.__context__


def _strip(details: Any, seen: set[int]) -> None:
    """Take our own frames, and those of the import machinery, out of a traceback and its causes."""
    import traceback

    if details is None or id(details) in seen:
        return
    seen.add(id(details))
    details.stack = traceback.StackSummary.from_list(
        [frame for frame in details.stack if not _ours(frame.filename)]
    )
    _strip(details.__cause__, seen)
    _strip(details.__context__, seen)
    for inner in getattr(details, "exceptions", None) or ():
        _strip(inner, seen)


def _ours(filename: str) -> bool:
    launch = os.path.dirname(os.path.abspath(__file__))
    watch = os.path.join(os.path.dirname(launch), "torch", "watch")  # stands between torch and the script
    return filename.startswith((launch + os.sep, watch + os.sep)) or filename.startswith(
        ("<frozen importlib", "<frozen runpy", "<frozen zipimport")
    )


def _own_line(frames: list[Any]) -> dict[str, Any] | None:
    """The deepest line of the user's own code: not in Hora, not installed, not of the standard library."""
    hora = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    library = os.path.dirname(os.__file__)
    rest = [frame for frame in frames if not _ours(frame.filename)]
    for foreign in ((hora, library, "site-packages", "dist-packages", "<frozen"), (hora, "<frozen")):
        for frame in reversed(rest):
            name = frame.filename  # relative only where the user named the script so
            if not any(name.startswith(part) or f"/{part}/" in name for part in foreign):
                return {
                    "file": frame.filename,
                    "line": frame.lineno,
                    "function": frame.name,
                    "code": frame.line or "",
                }
    return None
