"""A rank that is killed, stopped, raises or exits ends the job, or is judged, within 10 s: rank 0 too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked import Forked
from tests.jax.jobs import Ended, forks, run_forked

SOON = ("--stall-after", "2", "--stall-abort", "4")


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    yield from forks()


@pytest.mark.alone
@pytest.mark.parametrize(("how", "who"), [("kill", 0), ("kill", 1), ("raise", 0), ("exit", 1)])
def test_a_rank_that_fails_ends_the_job_and_is_named(
    how: str, who: int, forked: Forked, tmp_path: Path
) -> None:
    ended = run_forked(forked, tmp_path, 2, "failing.py", how, str(who))
    assert ended.code == {"kill": 137, "raise": 1, "exit": 7}[how], ended.printed
    text = {"kill": "SIGKILL", "raise": "this rank had enough", "exit": "exit code 7"}[how]
    assert text in ended.printed
    assert f"rank {who}" in ended.printed
    assert after_training(ended) < 10


@pytest.mark.alone
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_stopped_is_named(who: int, forked: Forked, tmp_path: Path) -> None:
    ended = run_forked(forked, tmp_path, 2, "failing.py", "stop", str(who), options=SOON)
    assert ended.code != 0, ended.printed
    late = [verdict for verdict in ended.verdicts if verdict["kind"] == "late-rank"]
    assert late
    assert late[0]["ranks"] == [who]
    assert after_training(ended) < 10


@pytest.mark.parametrize("how", ["shape", "batch"])
def test_mismatched_shapes_are_named_before_they_crash(how: str, forked: Forked, tmp_path: Path) -> None:
    ended = run_forked(forked, tmp_path, 2, "failing.py", how, "1")
    assert ended.code == 1, ended.printed
    [verdict] = [each for each in ended.verdicts if each["kind"] == "mismatched-calls"]
    words = {"shape": ("(4,)", "(3,)"), "batch": ("(2, 4)", "(3, 4)")}[how]
    assert all(word in verdict["text"] for word in words), verdict["text"]
    assert "Gloo all" not in ended.printed  # JAX was not started on it


@pytest.mark.parametrize(
    ("how", "when"), [("forgotten", "after step 1"), ("unequal", "before the first step")]
)
def test_replicas_that_differ_are_told(how: str, when: str, forked: Forked, tmp_path: Path) -> None:
    """JAX believes that they are the same, as the program says so."""
    ended = run_forked(forked, tmp_path, 2, "diverging.py", how)
    assert ended.code == 0, ended.printed
    [verdict] = ended.verdicts
    assert verdict["kind"] == "diverged", verdict
    assert "Parameter w " in verdict["text"]
    assert when in verdict["text"]


def test_the_guard_sees_the_training(forked: Forked, tmp_path: Path) -> None:
    """Compiled and outside of ``jit``: nothing is told of what is right, and each fault once, by its name."""
    ended = run_forked(forked, tmp_path, 2, "watched.py")
    assert ended.code == 0, ended.printed
    found = {verdict["kind"]: verdict for verdict in ended.verdicts}
    assert sorted(found) == ["diverged", "not-finite", "same-data"], ended.printed
    assert len(ended.verdicts) == 3
    right = max(map(float, re.findall(r"all was right at ([\d.]+)", ended.printed)))
    assert all(verdict["time"] > right for verdict in ended.verdicts)
    assert found["same-data"]["ranks"] == [0, 1]
    assert "hora.data_loader((x, y), global_batch=...)" in found["same-data"]["advice"]
    assert "At step 5" in found["not-finite"]["text"]
    assert "gradient of bias and 1 more" in found["not-finite"]["text"]
    assert found["not-finite"]["ranks"] == [1]
    assert "bias" in found["diverged"]["text"]


def after_training(ended: Ended) -> float:
    """Seconds from the step at which a rank fails to the end of the job."""
    return ended.at - max(map(float, re.findall(r"training ([\d.]+)", ended.printed)))
