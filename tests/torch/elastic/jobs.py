"""Starts elastic jobs of a test's own script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["LIMIT", "SOURCE", "Job", "environment", "until"]

SOURCE = Path(__file__).parents[3] / "src"
LIMIT = 240.0
"""Seconds: a bound for hosts that are busy with much else; alone each job takes some 5."""


def environment() -> dict[str, str]:
    """That of this process, for a job of this source."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    return environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


class Job:
    """One ``hora run`` with a training of this file."""

    def __init__(self, folder: Path, script: str, *arguments: object, options: tuple[str, ...]) -> None:
        self.folder = folder
        self.mark = f"TEST_MARK=elastic-{os.getpid()}-{folder.name}"
        (folder / "train.py").write_text(script)
        key, _, value = self.mark.partition("=")
        self._output = (folder / "output").open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hora.cli", "run", "--run-dir", "run", *options, "train.py"),
                *(str(folder), *map(str, arguments)),
            ],
            cwd=folder,
            env=environment() | {key: value},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)

    def wait(self) -> str:
        """All that was printed, when it has ended well and left nothing behind."""
        code = self.process.wait(LIMIT)
        output = (self.folder / "output").read_text()
        assert code == 0, output
        assert not self.processes(), "a process is left"
        return output

    def processes(self, kind: bytes = b"") -> list[int]:
        """Those of the job that live, with these bytes in their command."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                ours = self.mark.encode() in (path / "environ").read_bytes().split(b"\0")
                if ours and kind in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def worlds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "worlds.jsonl").read_text().splitlines()]


def until(condition: Callable[[], object]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
