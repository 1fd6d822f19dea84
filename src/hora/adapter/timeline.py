"""A timeline for a part of the script, in a file of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hora.adapter.context import Common
from hora.core.errors import UsageError
from hora.core.events import Timeline, read_events
from hora.core.trace import write_trace

__all__ = ["start", "stop"]


@dataclass(frozen=True, kw_only=True)
class _Recording:
    path: Path
    events: Path
    former: Timeline
    context: Common


_recording: _Recording | None = None


def start(context: Common, file_path: str | os.PathLike[str]) -> None:
    """Record what rank 0 does from here on, until :func:`stop`; meanwhile it records only here.

    Args:
        context: the job.
        file_path: the file that rank 0 writes when the recording stops: a Chrome trace. The other ranks
            write nothing.

    Raises:
        UsageError: a recording is going on.
    """
    global _recording
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


def stop(context: Common) -> None:
    """End the recording of :func:`start` and write its file; without one do nothing."""
    global _recording
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
