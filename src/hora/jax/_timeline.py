"""A timeline for a part of the script, in a file of its own."""

from __future__ import annotations

import os

from hora.adapter import timeline
from hora.jax._context import required

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str | os.PathLike[str]) -> None:
    """Record what rank 0 does from here on, until ``stop_timeline``.

    The run directory has a timeline of all ranks anyway (``timeline.json``); this one is for scripts that
    want one of a few steps, or have no run directory. Meanwhile rank 0 records only here. What runs inside
    compiled programs JAX's own profiler shows: ``jax.profiler.trace``.

    Args:
        file_path: the file that rank 0 writes when the recording stops: a Chrome trace, which Perfetto
            opens too. The other ranks write nothing.

    Raises:
        UsageError: a recording is going on.
    """
    timeline.start(required("start_timeline"), file_path)


def stop_timeline() -> None:
    """End the recording of ``start_timeline`` and write its file. Without one it does nothing.

    It also happens when the job ends.
    """
    timeline.stop(required("stop_timeline"))
