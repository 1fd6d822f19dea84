"""Keras on each of its backends: see ``job.py`` for what the ranks do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
LIMIT = 110.0
"""Seconds for a whole job with all its cases, on a busy machine."""

FEW = ("fit_is", "process_set", "metrics")
"""What three ranks have beyond two: uneven shares, sets of some ranks, sums of more than two."""


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize(("size", "cases", "end"), [(2, (), "raise"), (3, FEW, "kill")], ids=["2", "3"])
@pytest.mark.timeout(LIMIT + 10)
def test_ranks(backend: str, size: int, cases: tuple[str, ...], end: str, tmp_path: Path) -> None:
    """Every case passes on every rank; then one raises, or is killed, and the job ends within 10 s."""
    command = [sys.executable, "-m", "hora", "run", "-n", str(size), "--run-dir", str(tmp_path / "run")]
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    done = subprocess.run(
        [*command, str(JOB), *cases, "--end", end],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    ended = time.time()
    output = done.stdout + done.stderr
    for rank in range(size):
        assert f"rank {rank} of {size} on {backend}: passed" in output, output
    failing = re.search(r"failing at ([\d.]+)", output)
    assert failing is not None, output
    assert ended - float(failing[1]) < 10, output
    if end == "raise":
        assert done.returncode == 1, output
        assert "hora: rank 1 of 2 failed" in output, output
        assert "RuntimeError: this rank fails on purpose" in output, output
    else:
        assert done.returncode == 137, output
        assert re.search(r"hora: rank 0 of 3 .*(SIGKILL|killed)", output), output
