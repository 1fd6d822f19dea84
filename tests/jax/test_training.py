"""N workers are one worker: replicas bitwise equal, and within 1e-6 of one process on the union batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked import Forked
from tests.jax.jobs import ROOT, forks, run_forked


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    yield from forks()


@pytest.mark.parametrize("size", [2, 3])
def test_each_style_trains_what_one_process_trains(size: int, forked: Forked, tmp_path: Path) -> None:
    ended = run_forked(forked, tmp_path, size, "training.py")
    assert ended.code == 0, ended.printed
    assert ended.printed.count("done") == size
    assert not ended.verdicts


def test_the_example_for_many_workers_gives_the_losses_of_one(forked: Forked, tmp_path: Path) -> None:
    found = []
    for size in (1, 2):
        folder = tmp_path / f"{size}"
        folder.mkdir()
        ended = run_forked(forked, folder, size, str(ROOT / "examples" / "jax_with_hora.py"))
        assert ended.code == 0, ended.printed
        numbers = re.findall(r"^(?:\[0\] ?)?(\d+\.\d+)$", ended.printed, re.MULTILINE)
        found.append([float(text) for text in numbers])
    assert len(found[0]) == 10_000 // 96
    # float32: what is rounded otherwise in one step grows in the next ones.
    assert found[1][:20] == pytest.approx(found[0][:20], rel=1e-6)
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[0][-1] < 0.5 * found[0][0]
