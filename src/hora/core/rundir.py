"""The directory that a run leaves, and the only place that knows its layout.

::

    runs/<name>/
      run.json          configuration, versions, world, summary
      metrics.jsonl     one JSON object per line
      verdicts.jsonl    what the guard found, one JSON object per line; absent when it found nothing
      worlds.jsonl      of an elastic job: which workers took part, one JSON object per world
      logs/rank-0.log   everything rank 0 printed; after a restart in logs/attempt-2/
      failures/         one JSON file per rank that raised; after a restart in failures/attempt-2/
      events/           one file of timeline events per rank
      plan.json         what hora plan said before, of a run with --plan
      timeline.json     Chrome trace of all ranks; opens in Perfetto
      mlperf.log        when the workload keeps one
      report.html
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hora.core.errors import DiskFullError, HoraError, RunDirectoryError

__all__ = ["RunDirectory", "default_path", "disk_errors", "replace_text"]

MINIMUM_FREE_MB = 16
"""Below this a run is not started: logs and metrics of a short run take a few MB."""


class RunDirectory:
    """One run's directory. Make it with :meth:`create`; read it later with :meth:`open`.

    Attributes:
        attempt: how often the ranks have been started; the logs and failures of each start lie apart.
    """

    def __init__(self, path: Path, *, attempt: int = 1) -> None:
        self.path = path
        self.attempt = attempt
        self.run_json = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.verdicts = path / "verdicts.jsonl"
        self.worlds = path / "worlds.jsonl"
        self.timeline = path / "timeline.json"
        self.mlperf_log = path / "mlperf.log"
        self.report = path / "report.html"

    @classmethod
    def create(cls, path: Path, *, about: Mapping[str, Any] | None = None) -> RunDirectory:
        """Make the directory and write ``run.json``; on any error nothing is left behind.

        Args:
            path: must not exist, or be an empty directory.
            about: first content of ``run.json``.

        Raises:
            RunDirectoryError: the path is occupied, is a file, or cannot be written.
            DiskFullError: less than 16 MB are free there.
        """
        path = path.absolute()
        _check_vacant(path)
        run = cls(path)
        made: list[Path] = []
        try:
            with disk_errors(path):
                _check_space(_nearest_existing(path))
                for folder in (*reversed(path.parents), path):
                    if not folder.exists():
                        folder.mkdir(exist_ok=True)
                        made.append(folder)
                try:
                    (path / "logs").mkdir()  # of two jobs at the same moment one gets the directory
                except FileExistsError:
                    made.clear()
                    raise _occupied(path) from None
                made += [path / "logs", path / "failures", path / "events", run.run_json]
                (path / "failures").mkdir()
                (path / "events").mkdir()
                run.describe(created=time.time(), **(about or {}))
        except HoraError:
            _take_back(made)
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run directory.

        Raises:
            RunDirectoryError: there is no ``run.json``.
        """
        run = cls(path.absolute())
        if not run.run_json.is_file():
            raise RunDirectoryError(
                f"{path} is not a run directory: it holds no run.json.",
                fix="Give the directory that a run printed at its start, such as runs/resnet-1.",
            )
        return run

    def again(self) -> RunDirectory:
        """The same directory for the next start of all ranks.

        Raises:
            RunDirectoryError: it cannot be written (DiskFullError: no space).
        """
        following = RunDirectory(self.path, attempt=self.attempt + 1)
        with disk_errors(self.path):
            for place in (following.log(0), following.failure(0)):
                place.parent.mkdir(exist_ok=True)
            if self.metrics.exists():  # a rank that was killed may have left half a line
                with self.metrics.open("rb+") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)
        return following

    def log(self, rank: int) -> Path:
        """Where everything that a rank prints goes."""
        return self._of_attempt("logs") / f"rank-{rank}.log"

    def failure(self, rank: int) -> Path:
        """Where a rank writes the exception that it ends with."""
        return self._of_attempt("failures") / f"rank-{rank}.json"

    def _of_attempt(self, folder: str) -> Path:
        whole = self.path / folder
        return whole if self.attempt == 1 else whole / f"attempt-{self.attempt}"

    def events(self, rank: int) -> Path:
        """Where a rank appends its part of the timeline."""
        return self.path / "events" / f"rank-{rank}.jsonl"

    def describe(self, **entries: Any) -> None:
        """Merge entries into ``run.json`` in one atomic replacement. Only one process may call it."""
        about = self.about() if self.run_json.exists() else {}
        about.update(entries)
        replace_text(self.run_json, json.dumps(about, indent=2, default=str) + "\n")

    def about(self) -> dict[str, Any]:
        """The content of ``run.json``."""
        try:
            about: dict[str, Any] = json.loads(self.run_json.read_text())
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self.run_json} cannot be read: {error}.",
                fix="Give the directory of a run that was not edited.",
            ) from error
        return about

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``, whole or not at all. Only rank 0 may call it."""
        self._append(self.metrics, json.dumps(record) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Take out of ``metrics.jsonl`` all behind the step from which a run goes on. Only rank 0 may."""
        if not self.metrics.exists():
            return
        kept = [record for record in self.read_metrics() if not record.get("step", 0) > step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        if text != self.metrics.read_text():  # which may end in half a line, too
            replace_text(self.metrics, text)

    def append_verdict(self, line: str) -> None:
        """Add one line to ``verdicts.jsonl``, whole or not at all. Only the supervisor may call it."""
        self._append(self.verdicts, line)

    def append_world(self, record: Mapping[str, Any]) -> None:
        """Add one line to ``worlds.jsonl``, whole or not at all. Only the supervisor may call it."""
        self._append(self.worlds, json.dumps(record) + "\n")

    def replace_verdict(self, old: str, new: str) -> None:
        """Take out a line of ``verdicts.jsonl`` and add another, in one atomic replacement."""
        with disk_errors(self.path):
            lines = self.verdicts.read_text().splitlines(keepends=True) if self.verdicts.exists() else []
            replace_text(self.verdicts, "".join([*(line for line in lines if line != old), new]))

    def _append(self, path: Path, text: str) -> None:
        line = text.encode()
        with disk_errors(self.path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(before)
                raise

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``; a half-written last line is left out."""
        if not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(json.loads(line))
        return records


def default_path(name: str) -> Path:
    """``runs/<name>-<date>-<time>``, with a count behind it when that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path("runs") / stem
    count = 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{stem}-{count}"
    return path


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; on an error the old one stays and no draft is left.

    Raises:
        RunDirectoryError: it cannot be written (DiskFullError: no space).
    """
    draft = path.with_name(path.name + ".new")
    with disk_errors(path.parent):
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about ``path`` into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"The disk is full: nothing more can be written to {path}.",
                fix="Free some space, or choose another place with --run-dir PATH.",
            ) from error
        raise RunDirectoryError(
            f"{error.filename or path} cannot be written: {error.strerror or error}.",
            fix="Choose a place that you may write to with --run-dir PATH.",
        ) from error


def _check_vacant(path: Path) -> None:
    if path.is_dir():
        with disk_errors(path):
            occupied = any(path.iterdir())
        if not occupied:
            return
        raise _occupied(path)
    if path.exists() or path.is_symlink():
        kind = "a file" if path.exists() else "a link that leads nowhere"
        raise RunDirectoryError(
            f"The run directory {path} is {kind}.", fix="Choose another place with --run-dir PATH."
        )


def _occupied(path: Path) -> RunDirectoryError:
    what = f"The run directory {path} is occupied"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        created = json.loads((path / "run.json").read_text())["created"]
        what += f" by a run of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(created))}"
    return RunDirectoryError(f"{what}.", fix="Choose another with --run-dir PATH, or remove it first.")


def _nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _take_back(made: list[Path]) -> None:
    """Remove what was made, but never what another job put there meanwhile."""
    for place in reversed(made):
        with contextlib.suppress(OSError):
            place.rmdir() if place.is_dir() else place.unlink(missing_ok=True)


def _check_space(path: Path) -> None:
    if not os.access(path, os.W_OK):
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(path))
    free = shutil.disk_usage(path).free
    if free < MINIMUM_FREE_MB * 2**20:
        raise DiskFullError(
            f"Only {free / 2**20:.1f} MB are free at {path}; a run needs at least {MINIMUM_FREE_MB} MB.",
            fix="Free some space, or choose another place with --run-dir PATH.",
        )
