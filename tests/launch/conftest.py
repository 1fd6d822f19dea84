"""Runs real jobs with ``python -m hora.cli run`` in a directory of their own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src"
LIMIT = 30.0
PRELUDE = "import os, sys, time, signal\nrank = int(os.environ['HORA_RANK'])\n"


@dataclasses.dataclass
class Launched:
    """A finished ``hora run``."""

    code: int
    out: str
    err: str
    run: Path
    seconds: float

    def log(self, rank: int) -> str:
        return (self.run / "logs" / f"rank-{rank}.log").read_text(errors="replace")


class Bench:
    """Writes scripts and runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
        self.environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        self.environ.pop("COLUMNS", None)
        self.started: list[subprocess.Popen[str]] = []

    def script(self, body: str, name: str = "job.py") -> Path:
        path = self.folder / name
        path.write_text(PRELUDE + textwrap.dedent(body))
        return path

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hora.cli", "run", "--run-dir", str(self.run_dir), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        options = pipes | {"cwd": self.folder, "env": self.environ} | options
        process = subprocess.Popen(command, text=True, errors="replace", **options)
        self.started.append(process)
        return process

    def run(self, *arguments: str, **options: Any) -> Launched:
        began = time.monotonic()
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=LIMIT)
        return Launched(process.returncode, out, err, self.run_dir, time.monotonic() - began)

    def __call__(self, body: str, *options: str, workers: int = 2, arguments: Sequence[str] = ()) -> Launched:
        """Run a script with this body; ``options`` go to ``hora run``, ``arguments`` to the script."""
        return self.run("-n", str(workers), *options, str(self.script(body)), *arguments)

    def wait_for(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    def marked(self, text: str) -> list[int]:
        """Processes that have ``TEST_MARK=<text>`` in their environment."""
        mark = f"TEST_MARK={text}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A directory with scripts, and ``hora run`` in it; nothing of it survives the test."""
    bench = Bench(tmp_path)
    yield bench
    for process in bench.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
