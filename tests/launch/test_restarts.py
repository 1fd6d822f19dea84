"""``--restarts``: all ranks again after a failure, as long as there is progress."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.launch.conftest import Bench

TOLD = """
from hora.core import notices
attempt = int(os.environ["HORA_ATTEMPT"])
print("attempt", attempt, flush=True)

def saved(step):
    if rank == 0:
        notices.tell("saved", step=step)

"""


def attempts(bench: Bench) -> list[dict[str, Any]]:
    return json.loads((bench.run_dir / "run.json").read_text())["attempts"]


def test_a_job_is_started_again_until_it_ends_well(bench: Bench) -> None:
    ended = bench(
        TOLD
        + """
saved(100 * attempt)
if attempt < 3 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt < 3:
    time.sleep(60)
""",
        *("--restarts", "5"),
    )
    assert ended.code == 0, ended.err
    assert "hora: restart 1 of 5, from the checkpoint of step 100" in ended.err
    assert "hora: restart 2 of 5, from the checkpoint of step 200" in ended.err
    assert ended.err.count("rank 1 of 2 failed") == 2
    told = attempts(bench)
    assert [one["number"] for one in told] == [1, 2, 3]
    assert [one["exit_code"] for one in told] == [137, 137, 0]
    assert [one["saved"] for one in told] == [100, 200, 300]
    assert "SIGKILL" in told[0]["failure"]
    assert told[2]["failure"] is None
    about = json.loads((ended.run / "run.json").read_text())
    assert (about["exit_code"], about["failure"], about["restarts"]) == (0, None, 5)
    # The logs of each attempt lie apart.
    assert ended.log(0) == "attempt 1\n"
    for number in (2, 3):
        log = ended.run / "logs" / f"attempt-{number}" / "rank-1.log"
        assert log.read_text() == f"attempt {number}\n"
        assert f"log: run/logs/attempt-{number}/rank-1.log" in ended.err or number == 3


def test_without_progress_a_failure_is_repeated_twice(bench: Bench) -> None:
    ended = bench(TOLD + "raise ValueError('always')", "--restarts", "9")
    assert ended.code == 1
    assert len(attempts(bench)) == 3
    assert ended.err.splitlines()[-1] == (
        "hora: not started again: it has failed 3 times without a new checkpoint in between; 7 of 9 restarts "
        "left"
    )
    assert "no checkpoint was saved yet" in ended.err
    assert (
        "ValueError: always"
        in json.loads((ended.run / "failures" / "attempt-3" / "rank-0.json").read_text())["traceback"]
    )


def test_progress_in_between_starts_the_count_anew(bench: Bench) -> None:
    ended = bench(
        TOLD + "if attempt == 2: saved(5)\ntime.sleep(0.1)\nsys.exit(3)", "--restarts", "9", workers=1
    )
    assert ended.code == 3
    assert [one["saved"] for one in attempts(bench)] == [None, 5, None, None, None]


def test_restarts_are_counted(bench: Bench) -> None:
    ended = bench(TOLD + "saved(attempt)\ntime.sleep(0.1)\nsys.exit(3)", "--restarts", "1", workers=1)
    assert ended.code == 3
    assert len(attempts(bench)) == 2
    assert ended.err.splitlines()[-1] == "hora: no restart is left: all 1 were used (--restarts)"


def test_stopping_as_asked_and_timeouts_are_not_repeated(bench: Bench) -> None:
    ended = bench(TOLD + "time.sleep(60)", "--restarts", "3", "--timeout", "1")
    assert ended.code == 124
    assert len(attempts(bench)) == 1


def test_the_timeout_is_that_of_all_attempts_together(bench: Bench) -> None:
    body = TOLD + "saved(attempt)\ntime.sleep(0.7)\nsys.exit(3)"
    ended = bench(body, "--restarts", "50", "--timeout", "2", workers=1)
    assert ended.code == 124
    assert ended.seconds < 15


def test_a_job_that_was_asked_to_stop_is_not_started_again(bench: Bench) -> None:
    body = """
from hora.core import notices
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
notices.tell("edge")
time.sleep(0.3)
if rank == 0:
    os.kill(os.getppid(), signal.SIGTERM)  # the launcher
while not asked: time.sleep(0.01)
notices.tell("stopped", step=1)
raise notices.StopForNow
"""
    ended = bench(body, "--restarts", "3")
    assert ended.code == 75
    assert [one["exit_code"] for one in attempts(bench)] == [75]


def test_without_the_flag_nothing_changes(bench: Bench) -> None:
    ended = bench("raise ValueError('once')")
    assert ended.code == 1
    assert "restart" not in ended.err
    assert "attempts" not in json.loads((ended.run / "run.json").read_text())


@pytest.mark.parametrize("value", ["-1", "many", "1.5", ""])
def test_a_wrong_number_of_restarts(bench: Bench, value: str) -> None:
    ended = bench("", "--restarts", value)
    assert ended.code == 2
    assert "that is no number of restarts. Write --restarts 3." in ended.err
    assert not bench.run_dir.exists()
