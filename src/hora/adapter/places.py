"""Where a worker writes, and what it runs on."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy

from hora.core.rundir import RunDirectory
from hora.core.settings import Settings
from hora.core.version import VERSION
from hora.core.world import World

__all__ = ["run_directory", "versions"]

_own_runs: set[Path] = set()


def run_directory(world: World, settings: Settings) -> RunDirectory | None:
    """The run directory, made if this worker has to; None: nothing is written."""
    if settings.run_dir is None:
        return None
    path = settings.run_dir.absolute()
    if settings.job is not None or path in _own_runs:
        return RunDirectory.open(path)  # the launcher made it, or an earlier init() did
    _own_runs.add(path)
    if world.rank == 0:
        try:
            return RunDirectory.create(path)
        except BaseException:
            _own_runs.discard(path)
            raise
    return RunDirectory(path)  # rank 0 makes it before the ranks meet


def versions(**frameworks: str) -> dict[str, str]:
    """What this worker runs on: Hora, Python, the frameworks given, NumPy."""
    return {
        "hora": VERSION,
        "python": platform.python_version(),
        **frameworks,
        "numpy": numpy.__version__,
    }
