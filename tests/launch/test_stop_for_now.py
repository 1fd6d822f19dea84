"""Preemption: SIGTERM and SIGUSR1 become "save at the next step edge, then stop", with exit code 75."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from tests.launch.conftest import Bench

# What hora.Checkpoints does at its step edges, without PyTorch, which takes seconds to import.
EDGES = """
from hora.core import notices
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))

def edge(step):
    if asked:
        if rank == 0:
            notices.tell("saved", step=step)
        notices.tell("stopped", step=step)
        raise notices.StopForNow

def ready():
    notices.tell("edge")
    open(f"ready-{rank}", "w").close()

"""


def started(bench: Bench, body: str, *options: str, workers: int = 2) -> subprocess.Popen[str]:
    """A job all of whose ranks have come to ``ready()``, and been heard."""
    process = bench.start("-n", str(workers), *options, str(bench.script(EDGES + body)))
    bench.wait_for(lambda: all((bench.folder / f"ready-{rank}").exists() for rank in range(workers)))
    time.sleep(0.2)  # the notices are in the pipe; the supervisor tells nobody when it has read them
    return process


LOOP = """
ready()
for step in range(1, 6000):
    time.sleep(0.01)
    edge(step)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_can_is_asked_and_ends_with_75(bench: Bench, number: signal.Signals) -> None:
    process = started(bench, LOOP)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 75
    first, second, third = err.splitlines()[-3:]
    assert first == (
        f"hora: {number.name}: saving at the next step edge, then stopping (at most 30 s; a second signal "
        "stops at once)"
    )
    assert second.startswith(f"hora: stopped by {number.name} after step ")
    assert second.endswith(" is saved.")
    assert third == "  Go on with: hora run --resume run ..."
    about = json.loads((bench.run_dir / "run.json").read_text())
    assert about["exit_code"] == 75
    assert not list((bench.run_dir / "failures").iterdir())


def test_the_ranks_alone_may_be_asked_as_slurm_does(bench: Bench) -> None:
    process = started(bench, "open(f'pid-{rank}', 'w').write(str(os.getpid()))\n" + LOOP)
    for rank in (0, 1):
        subprocess.run(["kill", "-USR1", (bench.folder / f"pid-{rank}").read_text()], check=True)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 75
    assert "hora: stopped because its ranks were asked to after step " in err


def test_a_slow_rank_is_waited_for(bench: Bench) -> None:
    process = started(bench, "ready()\nwhile not asked: time.sleep(0.01)\ntime.sleep(2.5 * rank)\nedge(7)\n")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 75
    assert 2.0 < time.monotonic() - began < 10
    assert "after step 7; the checkpoint of step 7 is saved" in err


def test_ranks_that_come_to_no_step_edge_are_stopped_after_the_grace(bench: Bench) -> None:
    process = started(bench, "ready()\ntime.sleep(60)\n", "--env", "HORA_STOP_GRACE=0.5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert "stopped by SIGTERM without a checkpoint" in err
    assert "within 0.5 s (HORA_STOP_GRACE); 2 workers stopped." in err


@pytest.mark.alone
def test_a_second_signal_stops_at_once(bench: Bench) -> None:
    process = started(bench, "ready()\ntime.sleep(60)\n")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert time.monotonic() - began < 5
    assert "hora: terminated after" in err


def test_ctrl_c_does_not_wait_for_a_step_edge(bench: Bench) -> None:
    process = started(bench, "signal.signal(signal.SIGINT, signal.SIG_DFL)\nready()\ntime.sleep(60)\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "hora: interrupted after" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_script_without_step_edges_is_stopped_as_ever(bench: Bench, number: signal.Signals) -> None:
    body = "open(f'ready-{rank}', 'w').close()\ntime.sleep(60)\n"
    process = started(bench, body)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert "hora: terminated after" in err
    assert "2 workers stopped" in err


def test_one_rank_without_step_edges_keeps_the_others_from_waiting(bench: Bench) -> None:
    body = "if rank == 0: ready()\nopen(f'ready-{rank}', 'w').close()\ntime.sleep(60)\n"
    process = started(bench, body)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=15)
    assert process.returncode == 138


def test_a_rank_that_fails_while_it_saves_is_a_failure(bench: Bench) -> None:
    body = """
ready()
while not asked: time.sleep(0.01)
if rank == 1:
    raise ValueError("cannot be saved")
time.sleep(60)
"""
    process = started(bench, body)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 1
    assert "rank 1 of 2 failed" in err
    assert "ValueError: cannot be saved" in err


def test_a_job_that_ends_before_its_next_step_edge_has_ended_well(bench: Bench) -> None:
    process = started(bench, "ready()\nwhile not asked: time.sleep(0.01)\n")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0


def test_a_scripts_own_exit_code_75_is_a_failure_as_ever(bench: Bench) -> None:
    ended = bench("sys.exit(75)")
    assert ended.code == 75
    assert "all 2 ranks failed" in ended.err
