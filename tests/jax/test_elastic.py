"""A training of JAX goes on from its last commit when a worker is killed, and ends as if nothing was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.jax.jobs import run


def trained(folder: Path, size: int, victim: int) -> dict[str, np.ndarray]:
    out = folder / "trained.npz"
    ended = run(folder, size, "elastic.py", str(victim), str(out), options=("--restarts", "1"))
    assert ended.code == 0, ended.printed
    assert ("SIGKILL" in ended.printed) == (victim >= 0), ended.printed
    return dict(np.load(out))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return trained(tmp_path_factory.mktemp("alone"), 2, -1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_steps_and_nothing_else(victim: int, undisturbed, tmp_path: Path) -> None:
    found = trained(tmp_path, 2, victim)
    assert found.keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert found["step"] == 16  # 4 epochs of 4 batches
