"""Every operation and dtype, as N ranks of one job see them; and a job in which no other framework is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked import Forked
from tests.jax.jobs import SCRIPTS, environment, forks, run_forked


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    yield from forks(JAX_ENABLE_X64="1")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_and_dtype_is_that_of_numpy_in_float64(
    size: int, forked: Forked, tmp_path: Path
) -> None:
    ended = run_forked(forked, tmp_path, size, "operations.py")
    assert ended.code == 0, ended.printed
    assert ended.printed.count(" checks") == size


BLOCKED = """
import sys, runpy

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensorflow", "keras"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Blocked())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_no_other_framework_is_imported(tmp_path: Path) -> None:
    """All of hora.jax, on one worker, by plain python, without a launcher."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(SCRIPTS / "operations.py")],
        cwd=tmp_path,
        env=environment(JAX_ENABLE_X64="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1" in done.stdout
