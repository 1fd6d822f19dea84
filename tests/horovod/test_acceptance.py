"""Horovod's interface as its scripts use it: whole modules of tests, run by every rank of a real job.

One job for each number of workers. Ranks are forked from a process that has imported their framework.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.forked import Forked

HERE = Path(__file__).parent

TORCH = ("operations", "optimizers", "breadth")
TENSORFLOW = ("tensorflow_operations", "tensorflow_training")
LIMIT = 200
"""Seconds for a whole job with all its cases, on a busy machine."""


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.timeout(LIMIT + 20)
def test_acceptance(workers: int, torch: Forked, tmp_path: Path) -> None:
    _run(torch, TORCH, workers, tmp_path)


@pytest.mark.parametrize(
    ("workers", "modules"),
    [(1, ("tensorflow_names", *TENSORFLOW)), (2, TENSORFLOW), (3, TENSORFLOW[:1])],
    ids=["1", "2", "3"],
)
@pytest.mark.timeout(LIMIT + 20)
def test_acceptance_of_tensorflow(
    workers: int, modules: tuple[str, ...], tensorflow: Forked, tmp_path: Path
) -> None:
    _run(tensorflow, modules, workers, tmp_path)


@pytest.fixture(scope="module")
def torch() -> Iterator[Forked]:
    yield from _forked("hora.torch")


@pytest.fixture(scope="module")
def tensorflow() -> Iterator[Forked]:
    yield from _forked("hora.tensorflow", TF_NUM_INTRAOP_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2")


def _forked(module: str, **variables: str) -> Iterator[Forked]:
    forked = Forked(module, patience=LIMIT + 10, env=variables)
    yield forked
    forked.close()


def _run(forked: Forked, modules: Sequence[str], workers: int, tmp_path: Path) -> None:
    pytest_flags = [
        *("-q", "-x", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull),
        *("--rootdir", str(tmp_path)),
    ]
    code, text = forked.run(
        *("--horovod", "-np", str(workers), "--env", "HORA_TIMEOUT=30"),
        *("--run-dir", str(tmp_path / "run"), "--timeout", str(LIMIT), "-m", "pytest", *pytest_flags),
        *(str(HERE / "acceptance" / f"{module}.py") for module in modules),
        folder=tmp_path,
    )
    assert code == 0, text
