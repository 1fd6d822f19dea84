"""No process of a job outlives it, and Ctrl-C ends it in one line."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launch.conftest import PRELUDE, Bench

from hora.launch import _reaper

FAMILY = """
    if os.fork() == 0:                      # a loader worker
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if os.fork() == 0:                      # a daemon: own session, parent gone
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    print("ready", flush=True)
    time.sleep({seconds})
"""


def _running(bench: Bench, *options: str, seconds: float = 600) -> subprocess.Popen[str]:
    """A job of two ranks, each with a child and a daemon."""
    bench.environ["TEST_MARK"] = bench.folder.name
    path = bench.script(FAMILY.format(seconds=seconds))
    process = bench.start("-n", "2", *options, str(path))
    bench.wait_for(lambda: len(_started(bench)) >= 6)
    return process


def _started(bench: Bench) -> list[int]:
    own = {process.pid for process in bench.started}
    return [pid for pid in bench.marked(bench.folder.name) if pid not in own and _is_python_job(pid)]


def _is_python_job(pid: int) -> bool:
    try:
        return b"_worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.alone
def test_sigkill_to_the_launcher_leaves_nothing_within_five_seconds(bench: Bench) -> None:
    process = _running(bench)
    process.kill()
    process.wait()
    began = time.monotonic()
    bench.wait_for(lambda: not bench.marked(bench.folder.name), seconds=5.0)
    assert time.monotonic() - began < 5.0


def test_a_killed_launcher_is_told_of_on_its_terminal_and_in_the_run_directory(bench: Bench) -> None:
    run = bench.folder / "told"
    process = _running(bench, "--run-dir", str(run))
    bench.wait_for(lambda: len(_reapers_of(process.pid)) == 1)
    process.kill()
    _, err = process.communicate(timeout=10)  # the reaper holds the launcher's stderr, and ends
    assert err.splitlines()[-1] == f"hora: {_reaper.KILLED}; logs: {run}/logs"
    about = json.loads((run / "run.json").read_text())
    assert (about["exit_code"], about["failure"]) == (137, _reaper.KILLED)
    assert about["ended"] > about["created"]


def test_a_job_that_has_ended_is_not_told_to_have_been_killed(tmp_path: Path) -> None:
    text = json.dumps({"ended": 5.0, "exit_code": 0})
    (tmp_path / "run.json").write_text(text)
    _reaper.tell(str(tmp_path))
    assert (tmp_path / "run.json").read_text() == text


def test_sigkill_to_the_launcher_just_after_its_start(bench: Bench) -> None:
    bench.environ["TEST_MARK"] = bench.folder.name
    path = bench.script("time.sleep(600)")
    for delay in (0.05, 0.1, 0.13, 0.16, 0.2):
        process = bench.start("--run-dir", str(bench.folder / f"run-{delay}"), "-n", "2", str(path))
        time.sleep(delay)  # an odd moment is the point here
        process.kill()
        process.wait()
    bench.wait_for(lambda: not bench.marked(bench.folder.name), seconds=5.0)


def test_the_normal_end_stops_leftovers_and_names_them(bench: Bench) -> None:
    process = _running(bench, seconds=0.5)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "hora: stopped 4 processes that the ranks left behind: python" in err
    assert not bench.marked(bench.folder.name)


def test_children_that_end_with_their_rank_are_no_leftovers(bench: Bench) -> None:
    ended = bench(
        """
        if os.fork() == 0:
            parent = os.getppid()
            while os.getppid() == parent: time.sleep(0.02)
            time.sleep(0.1)
            os._exit(0)
        """
    )
    assert ended.code == 0
    assert "left behind" not in ended.err


def test_a_job_inside_a_rank_dies_with_the_outer_launcher(bench: Bench) -> None:
    bench.environ["TEST_MARK"] = bench.folder.name
    inner = bench.script(FAMILY.format(seconds=600), "inner.py")
    outer = bench.script(
        f"""
        import subprocess
        command = [sys.executable, "-m", "hora.cli", "run", "--run-dir", "inner", "-n", "2", {str(inner)!r}]
        sys.exit(subprocess.run(command).returncode)
        """
    )
    process = bench.start("-n", "1", str(outer))
    bench.wait_for(lambda: len(_started(bench)) >= 7)
    process.kill()
    process.wait()
    bench.wait_for(lambda: not bench.marked(bench.folder.name), seconds=5.0)


def _in_terminal(bench: Bench, path: Path, *, keys: int) -> tuple[int, str, float]:
    """Run on a pseudo-terminal, press Ctrl-C when both ranks are ready.

    Returns the exit code, what stood on the terminal, and the seconds since the first key.
    """
    main, terminal = pty.openpty()
    process = bench.start(
        *("-n", "2", str(path)), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    text = b""
    try:
        while text.count(b"ready") < 2:
            text += os.read(main, 4096)
        began = time.monotonic()
        for _ in range(keys):
            os.write(main, b"\x03")
            time.sleep(0.3)  # two key presses are two signals only with some time between them
        while True:
            text += os.read(main, 4096)
    except OSError:  # EIO: the last one on the terminal has gone
        code = process.wait(timeout=20)
    finally:
        os.close(main)
    return code, text.decode(), time.monotonic() - began


def test_ctrl_c_ends_in_one_line(bench: Bench) -> None:
    bench.environ["TEST_MARK"] = bench.folder.name
    path = bench.script("print('ready', flush=True); time.sleep(600)")
    code, text, _ = _in_terminal(bench, path, keys=1)
    assert code == 130
    after = text[text.rindex("ready") + 5 :].replace("^C", "").strip()
    assert re.fullmatch(r"hora: interrupted after \d+ s; 2 workers stopped\.", after)
    assert not bench.marked(bench.folder.name)


@pytest.mark.alone
def test_a_second_ctrl_c_kills_at_once(bench: Bench) -> None:
    path = bench.script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    )
    code, text, seconds = _in_terminal(bench, path, keys=2)
    assert code == 130
    assert "hora: interrupted after" in text
    assert seconds < 4.5  # one Ctrl-C alone would wait for 5 s


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")]
)
def test_sigterm_and_sighup_stop_the_workers(bench: Bench, number: int, code: int, word: str) -> None:
    process = _running(bench)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert re.fullmatch(rf"hora: {word} after \d+ s; 2 workers stopped\.", err.splitlines()[-1])
    assert "Traceback" not in err
    assert not bench.marked(bench.folder.name)


def test_workers_may_save_their_state_on_sigterm(bench: Bench) -> None:
    path = bench.script(
        """
        def save(*_):
            open(f"saved-{rank}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open(f"ready-{rank}", "w").close()
        time.sleep(600)
        """
    )
    process = bench.start("-n", "2", str(path))
    bench.wait_for(lambda: len(list(bench.folder.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert len(list(bench.folder.glob("saved-*"))) == 2


def test_a_launcher_that_ignores_sighup_goes_on(bench: Bench) -> None:
    path = bench.script("print('ready', flush=True); time.sleep(0.5)")
    command = [sys.executable, "-m", "hora.cli", "run", str(path)]
    process = subprocess.Popen(
        ["nohup", *command],
        cwd=bench.folder,
        env=bench.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
    assert process.returncode == 0


def test_the_reaper_finds_exactly_the_processes_of_a_job(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PRELUDE.partition("\n")[0] + "; time.sleep(60)"]
    ours = subprocess.Popen(command, env={"HORA_JOB": "abc123"})
    other = subprocess.Popen(command, env={"HORA_JOB": "abc1234", "X": "HORA_JOB=abc123"})
    try:
        assert _reaper.sweep("abc123", 2.0) == [ours.pid]
        assert ours.wait(timeout=5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_a_killed_reaper_is_replaced_and_the_next_one_does_its_work(bench: Bench) -> None:
    launcher = _running(bench)
    bench.wait_for(lambda: len(_reapers_of(launcher.pid)) == 1)  # it is started after the ranks
    first = _reapers_of(launcher.pid)
    os.kill(first[0], signal.SIGKILL)
    bench.wait_for(lambda: _reapers_of(launcher.pid) not in ([], first))
    launcher.kill()
    launcher.wait()
    bench.wait_for(lambda: not bench.marked(bench.folder.name), seconds=5.0)


def _reapers_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [pid for pid in map(int, children) if b"_reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
