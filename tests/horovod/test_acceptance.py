"""Horovod's interface as its scripts use it: whole modules of tests, run by every rank of a real job.

One job for each number of workers, as each rank has to import its framework.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")


TORCH = ("operations", "optimizers", "breadth")
TENSORFLOW = ("tensorflow_operations", "tensorflow_training")
LIMIT = 200
"""Seconds for a whole job with all its cases, on a busy machine."""


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.timeout(LIMIT + 20)
def test_acceptance(workers: int, tmp_path: Path) -> None:
    _run(TORCH, workers, tmp_path)


@pytest.mark.parametrize(
    ("workers", "modules"),
    [(1, ("tensorflow_names", *TENSORFLOW)), (2, TENSORFLOW), (3, TENSORFLOW[:1])],
    ids=["1", "2", "3"],
)
@pytest.mark.timeout(LIMIT + 20)
def test_acceptance_of_tensorflow(workers: int, modules: tuple[str, ...], tmp_path: Path) -> None:
    _run(modules, workers, tmp_path)


def _run(modules: Sequence[str], workers: int, tmp_path: Path, *, limit: int = LIMIT) -> None:
    pytest_flags = [
        *("-q", "-x", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull),
        *("--rootdir", str(tmp_path)),
    ]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "hora", "run", "--horovod", "-np", str(workers)),
            *("--run-dir", str(tmp_path / "run"), "--timeout", str(limit), "-m", "pytest", *pytest_flags),
            *(str(HERE / "acceptance" / f"{module}.py") for module in modules),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": SOURCE,
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "HORA_TIMEOUT": "30",
        },
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
