"""Runs jobs of ``hora.jax`` by ``python -m hora.cli run``, in a directory of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.forked import Forked

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 110.0
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling takes longer than all else


@dataclasses.dataclass
class Ended:
    """A job that has ended, at this time."""

    code: int
    printed: str
    run: Path
    at: float

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        path = self.run / "verdicts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HORA_", "XLA_", "JAX_"))}
    return (
        kept
        | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HORA_PROGRESS": "off"}
        | QUICK
        | more
    )


def forks(**variables: str) -> Iterator[Forked]:
    """For a fixture: runs jobs whose ranks are forked, for :func:`run_forked`.

    Args:
        variables: what JAX reads when it is imported.
    """
    forked = Forked("hora.jax", patience=LIMIT, env=QUICK | variables)
    yield forked
    forked.close()


def run_forked(
    forked: Forked, folder: Path, size: int, script: str, *arguments: str, options: tuple[str, ...] = ()
) -> Ended:
    """Run ``tests/jax/scripts/<script>`` on so many ranks, which do not import JAX anew."""
    words = ("-n", str(size), "--run-dir", "run", "--env", "HORA_PROGRESS=off", *options)
    code, printed = forked.run(*words, str(SCRIPTS / script), *arguments, folder=folder)
    return Ended(code, printed, folder / "run", time.time())


def start(
    folder: Path, size: int, script: str, *arguments: str, options: tuple[str, ...] = (), **more: str
) -> Any:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "hora.cli", "run", "-n", str(size), "--run-dir", "run", *options]
    return subprocess.Popen(
        [*command, str(SCRIPTS / script), *arguments],
        cwd=folder,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(
    folder: Path, size: int, script: str, *arguments: str, options: tuple[str, ...] = (), **more: str
) -> Ended:
    """Run ``tests/jax/scripts/<script>`` on so many ranks, each a new interpreter."""
    with start(folder, size, script, *arguments, options=options, **more) as job:
        try:
            printed, _ = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
    return Ended(job.returncode, printed, folder / "run", time.time())
