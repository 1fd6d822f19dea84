"""A committed state in the run directory: arrays and plain values, never a pickle, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hora.core import commits
from hora.core.errors import CheckpointError
from hora.core.rundir import RunDirectory

__all__ = ["Stored", "folder_of", "newest", "write"]

STATE = "state.npz"
KEPT = 2
"""Commits kept on the disk: the last one, and the one before in case that is damaged."""


class Stored(NamedTuple):
    """What one commit holds: how many commits there were, values by name, and arrays in order."""

    commits: int
    values: dict[str, Any]
    arrays: list[Any]


def folder_of(run: RunDirectory | None) -> Path | None:
    """Where a run's commits are; ``None`` for a script that ``hora run`` did not start."""
    return None if run is None else run.path / "checkpoints"


def write(folder: Path, *, count: int, world: int, values: Mapping[str, Any], arrays: Sequence[Any]) -> None:
    """Write one commit; the marker comes last. One rank calls it.

    Args:
        folder: of the run's commits.
        count: of commits until now, this one included.
        world: number of ranks.
        values: by name, such as JSON takes.
        arrays: NumPy arrays, in an order that the reader knows.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = commits.free_place(folder, count)
        place.path.mkdir()
        known = {**values, "_commits": count, "_dtypes": [str(array.dtype) for array in arrays]}
        with (place.path / STATE).open("wb") as file:
            np.savez(
                file,
                values=np.frombuffer(json.dumps(known, default=_scalar).encode(), np.uint8),
                **{str(index): _plain(array) for index, array in enumerate(arrays)},
            )
            file.flush()
            os.fsync(file.fileno())
        size, digest = (place.path / STATE).stat().st_size, commits.digest_of(place.path / STATE)
        commits.write(
            place.path,
            commits.Commit(
                step=count,
                world=world,
                files={STATE: (size, digest)},
                time=(place.path / STATE).stat().st_mtime,
            ),
        )
        commits.prune(commits.places(folder), keep=KEPT)
    except (OSError, TypeError) as error:
        raise CheckpointError(
            f"The state cannot be committed to {folder}: {error}",
            fix="Give the state values that JSON takes, and see that there is space on the disk.",
        ) from error


def newest(folder: Path) -> Stored | None:
    """The last commit that is whole; a worker that was killed while it wrote leaves one that is not."""
    for place in commits.places(folder):
        try:
            if commits.problem_of(place.path, commits.read(place)) is not None:
                continue
        except commits.DamagedError:
            continue
        with np.load(place.path / STATE, allow_pickle=False) as stored:
            values = json.loads(bytes(stored["values"]))
            kinds = values.pop("_dtypes")
            arrays = [_typed(stored[str(index)], kind) for index, kind in enumerate(kinds)]
        return Stored(int(values.pop("_commits")), values, arrays)
    return None


def _scalar(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no value such as JSON takes")


def _plain(array: Any) -> Any:
    """bfloat16 and float8 as bytes: NumPy's files know its own dtypes only."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _typed(array: Any, kind: str) -> Any:
    if str(array.dtype) == kind:
        return array
    import ml_dtypes

    return array.view(np.dtype(getattr(ml_dtypes, kind)))
