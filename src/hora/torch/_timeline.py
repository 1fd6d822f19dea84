"""A timeline for a part of the script, in a file of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hora.core.errors import UsageError
from hora.core.events import Timeline, read_events
from hora.core.trace import write_trace
from hora.torch import _context

__all__ = ["start_timeline", "stop_timeline"]


@dataclass(frozen=True, kw_only=True)
class _Recording:
    path: Path
    events: Path
    former: Timeline
    context: _context.Context


_recording: _Recording | None = None


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what rank 0 does from here on, until ``stop_timeline``.

    The run directory has a timeline of all ranks anyway (``timeline.json``); this one is for scripts that
    want one of a few steps, or have no run directory. Meanwhile rank 0 records only here.

    Args:
        file_path: the file that rank 0 writes when the recording stops: a Chrome trace, which Perfetto
            opens too. The other ranks write nothing.
        mark_cycles: accepted for scripts written for Horovod; there are no cycles to mark.

    Raises:
        UsageError: a recording is going on.
    """
    global _recording
    context = _context.required("start_timeline")
    if _recording is not None and _recording.context is context:
        raise UsageError(
            f"A timeline is being recorded for {_recording.path}.", fix="Call hora.stop_timeline() first."
        )
    path = Path(file_path).absolute()
    events = path.with_name(f".{path.name}.{os.getpid()}.jsonl")
    _recording = _Recording(path=path, events=events, former=context.timeline, context=context)
    if context.world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        context.timeline = Timeline(events, rank=0, limit=context.settings.timeline_events)
        context.closing.append(_write)


def stop_timeline() -> None:
    """End the recording of ``start_timeline`` and write its file. Without one it does nothing.

    It also happens when the job ends.
    """
    global _recording
    context = _context.required("stop_timeline")
    if _recording is not None and _recording.context is context and context.world.rank == 0:
        _write()
    _recording = None


def _write() -> None:
    global _recording
    recording, _recording = _recording, None
    if recording is None:
        return
    context = recording.context
    context.closing.remove(_write)
    context.timeline.close()
    context.timeline = recording.former
    recording.events.touch()
    write_trace({0: read_events(recording.events)}, recording.path)
    recording.events.unlink()
