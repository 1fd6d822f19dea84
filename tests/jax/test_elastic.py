"""A training of JAX goes on from its last commit when a worker is killed, and ends as if nothing was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.forked import Forked
from tests.jax.jobs import forks, run_forked


def trained(forked: Forked, folder: Path, victim: int) -> dict[str, np.ndarray]:
    out = folder / "trained.npz"
    options = ("--restarts", "1")
    ended = run_forked(forked, folder, 2, "elastic.py", str(victim), str(out), options=options)
    assert ended.code == 0, ended.printed
    assert ("SIGKILL" in ended.printed) == (victim >= 0), ended.printed
    return dict(np.load(out))


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    yield from forks()


@pytest.fixture(scope="module")
def undisturbed(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return trained(forked, tmp_path_factory.mktemp("alone"), -1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_steps_and_nothing_else(
    victim: int, undisturbed: dict[str, np.ndarray], forked: Forked, tmp_path: Path
) -> None:
    found = trained(forked, tmp_path, victim)
    assert found.keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert found["step"] == 16  # 4 epochs of 4 batches
