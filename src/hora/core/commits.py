"""Checkpoints in a directory: which are whole, which are damaged and how, and which may go.

::

    checkpoints/
      lock                    held by the run that writes here
      step-00000500/          one checkpoint; step-00000500-2 is the second of that step
        layout.json           which tensor lies where
        rank-00000.safetensors
        rank-00001.safetensors
        commit.json           the marker, written last: step, world, size and digest of every file

A folder without a valid marker is not a checkpoint. Nothing here knows what the files hold, and nothing
imports a framework.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.core.version import VERSION

__all__ = [
    "MARKER",
    "Commit",
    "DamagedError",
    "Place",
    "digest_of",
    "free_place",
    "place_at",
    "place_of",
    "places",
    "problem_of",
    "prune",
    "read",
    "remove",
    "sync_folder",
    "write",
]

MARKER = "commit.json"
FORMAT = 1
BLOCK = 4 * 2**20
"""Bytes that are read and hashed at a time."""

LARGEST_MARKER = 256 * 2**20
"""Bytes; a marker has some 150 for each rank."""

_FOLDER = re.compile(r"step-(\d{8,15})(?:-([1-9]\d{0,5}))?")


class DamagedError(ValueError):
    """A folder is no checkpoint; the text says why. It is always caught, and told."""


@dataclass(frozen=True, order=True)
class Place:
    """A folder for the checkpoint of a step; later ones are larger.

    Attributes:
        step: steps made.
        attempt: counts the folders of one step, from 1.
        path: the folder.
    """

    step: int
    attempt: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What a marker says.

    Attributes:
        step: steps made.
        world: number of workers that wrote.
        files: name -> (bytes, SHA-256 in hexadecimal).
        time: when it was committed, ``time.time()`` in seconds.
        version: of Hora.
    """

    step: int
    world: int
    files: Mapping[str, tuple[int, str]]
    time: float
    version: str = VERSION

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())


def places(directory: Path) -> list[Place]:
    """The folders that may be checkpoints, newest first; none where the directory does not exist.

    Raises:
        OSError: the directory cannot be read.
    """
    found = []
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return []
    for entry in entries:
        match = _FOLDER.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append(Place(int(match[1]), int(match[2] or 1), directory / entry.name))
    return sorted(found, reverse=True)


def place_at(folder: Path) -> Place | None:
    """The place of a folder by its name; None: it has not that of a checkpoint."""
    match = _FOLDER.fullmatch(folder.absolute().name)
    return None if match is None else Place(int(match[1]), int(match[2] or 1), folder)


def free_place(directory: Path, step: int) -> Place:
    """A folder that does not exist yet."""
    taken = [place.attempt for place in places(directory) if place.step == step]
    return place_of(directory, step, max(taken, default=0) + 1)


def place_of(directory: Path, step: int, attempt: int) -> Place:
    """The folder of one attempt."""
    name = f"step-{step:08d}" + (f"-{attempt}" if attempt > 1 else "")
    return Place(step, attempt, directory / name)


def write(folder: Path, commit: Commit) -> None:
    """Make a checkpoint of a folder whose files are all on the disk: the marker appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    draft = folder / (MARKER + ".new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(_text(commit))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    draft.replace(folder / MARKER)
    sync_folder(folder)
    sync_folder(folder.parent)


def read(place: Place) -> Commit:
    """The marker of a checkpoint, without a look at the files.

    Raises:
        DamagedError: there is none, or it is not what was written.
        OSError: it cannot be read.
    """
    marker = place.path / MARKER
    try:
        with marker.open("rb") as file:
            data = file.read(LARGEST_MARKER)
    except FileNotFoundError:
        raise DamagedError(f"it has no {MARKER}: its writing was not completed") from None
    try:
        record = json.loads(data)
        version = record["format"]
        commit = Commit(
            step=_whole(record["step"]),
            world=_whole(record["world"]),
            files={_name(name): (_whole(size), str(text)) for name, (size, text) in record["files"].items()},
            time=float(record["time"]),
            version=str(record["hora"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"its {MARKER} is torn or altered") from None
    if version != FORMAT:
        raise DamagedError(f"its format is {version!r}; Hora {VERSION} reads {FORMAT}")
    if data != _text(commit).encode():
        raise DamagedError(f"its {MARKER} is not what was written")
    if commit.step != place.step:
        raise DamagedError(f"its {MARKER} is that of step {commit.step}")
    return commit


def problem_of(folder: Path, commit: Commit, names: Iterable[str] | None = None) -> str | None:
    """What is wrong with the files of a checkpoint, as the end of a sentence; None: they are as written.

    Args:
        folder: the checkpoint.
        commit: its marker.
        names: the files to look at; None: all. Different ranks may look at different files.
    """
    for name in sorted(commit.files) if names is None else names:
        size, digest = commit.files[name]
        try:
            status = (folder / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a file"
            if status.st_size < size:
                return f"{name} is truncated: {status.st_size} of {size} bytes are there"
            if status.st_size > size:
                return f"{name} has {status.st_size} bytes where {size} were written"
            if digest_of(folder / name) != digest:
                return f"{name} is not what was written: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def prune(
    there: Iterable[Place],
    *,
    keep: int,
    keep_every: int | None = None,
    damaged: Collection[Path] = (),
    spare: Collection[Path] = (),
) -> list[Place]:
    """Remove checkpoints that are not needed any more; what was removed.

    Kept are the newest ``keep`` good ones, what is newer than the last of these, and the good ones of a
    step that ``keep_every`` divides. Folders without a marker were left by a run that was killed, and go.

    Args:
        there: what :func:`places` found in the directory of the run that holds its lock.
        keep: how many good ones, at least 1.
        keep_every: steps; None: none is kept for ever.
        damaged: folders with a marker that are known not to be good.
        spare: folders that are being written.

    Raises:
        OSError: one cannot be removed.
    """
    removed: list[Place] = []
    steps: set[int] = set()
    for place in there:
        marked = (place.path / MARKER).exists()
        if place.path in spare:
            continue
        if marked and place.path in damaged and len(steps) < keep:
            continue
        if marked and place.path not in damaged and place.step not in steps:
            steps.add(place.step)
            if len(steps) <= keep or (keep_every is not None and place.step % keep_every == 0):
                continue
        remove(place.path)
        removed.append(place)
    return removed


def remove(folder: Path) -> None:
    """Remove a checkpoint, its marker first: what is removed by half must not look whole.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):  # somebody else removes it too
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def digest_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest, buffer = hashlib.sha256(), bytearray(BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(commit: Commit) -> str:
    """The marker, its own digest included: one text for one commit, so that any other is an altered one."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "step": commit.step,
        "world": commit.world,
        "files": {name: list(entry) for name, entry in sorted(commit.files.items())},
        "hora": commit.version,
        "time": commit.time,
    }
    record["digest"] = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    return json.dumps(record, indent=1) + "\n"


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value


def _name(value: Any) -> str:
    """A file's name that leads nowhere else."""
    if (
        not isinstance(value, str)
        or not value
        or "/" in value
        or "\0" in value
        or value in (".", "..", MARKER)
    ):
        raise ValueError(value)
    return value
