"""`hora run --horovod` and `horovodrun`: real jobs of Horovod scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hora.launch import ScriptTarget, horovod

SOURCE = str(Path(__file__).parents[2] / "src")


def job(words: list[str], script: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "HORA_TIMEOUT": "20", **environ},
        cwd=folder,
        timeout=60,
        check=False,
    )


def test_a_script_may_end_without_shutdown_and_with_something_pending(tmp_path: Path) -> None:
    script = """
import horovod, horovod.torch as hvd, os, torch
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
if hvd.rank() == 0:
    hvd.allreduce_async(torch.ones(1), name="never")
print("rank", os.environ["HOROVOD_RANK"], "of", os.environ["HOROVOD_SIZE"], horovod.__version__)
"""
    ended = job(
        ["hora", "run", "--horovod", "-np", "2", "script.py"],
        script,
        tmp_path,
        HOROVOD_CYCLE_TIME="5",
        HOROVOD_FUSION_THRESHOLD="1000",
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"rank (\d) of 2 0\.28\.1", ended.stdout)) == ["0", "1"]
    assert ended.stderr.count("HOROVOD_CYCLE_TIME has no effect") == 1
    assert "HOROVOD_FUSION_THRESHOLD" not in ended.stderr


def test_the_first_failure_is_reported_and_not_its_echo(tmp_path: Path) -> None:
    script = """
import horovod.torch as hvd, torch
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    raise ValueError("bad sample 17")
hvd.allreduce(torch.ones(1))
"""
    ended = job(
        ["hora.cli.horovodrun", "-np", "2", "--mpi", "-H", "localhost:2", "python", "-u", "script.py"],
        script,
        tmp_path,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert ended.returncode == 1
    assert "rank 1 of 2 failed" in ended.stderr
    assert "bad sample 17" in ended.stderr
    assert "--mpi has no effect" in ended.stderr


def test_horovodrun_runs_any_program_and_writes_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.sh").write_text(f"exec {sys.executable} script.py\n")
    script = """
import horovod.torch as hvd, torch
hvd.init()
hvd.allreduce(torch.ones(2), name="gradient")
print("done", hvd.rank())
"""
    ended = job(
        [
            *("hora.cli.horovodrun", "--num-proc", "2", "--timeline-filename", "timeline.json"),
            *("--output-filename", "out", "sh", "config.sh"),
        ],
        script,
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "NEGOTIATE_ALLREDUCE" in (tmp_path / "timeline.json").read_text()
    assert [(tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == [
        "done 0\n",
        "done 1\n",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-np", "2"], "nothing to run"),
        (["-np", "2", "no-such-program"], "no program 'no-such-program'"),
        (["sh", "x"], "number of workers is missing"),
        (["-np", "2", "-H", "far:x", "sh", "x"], "-H far:x: 'far:x' is not of the form host:slots"),
        (["-np", "3", "-H", "localhost:2", "sh", "x"], "do not fit in the 2 slots"),
        (["-np", "2", "--host-discovery-script", "x", "sh", "x"], "which is to name the hosts"),
    ],
)
def test_what_cannot_be_run_is_told(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from hora.cli.horovodrun import main

    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_check_build(capsys: pytest.CaptureFixture[str]) -> None:
    from hora.cli.horovodrun import main

    assert main(["--check-build"]) == 0
    shown = capsys.readouterr().out
    assert "[X] PyTorch" in shown
    assert "[X] Gloo" in shown
    assert "[ ] MPI" in shown


def test_each_variable_without_effect_is_told_in_one_line() -> None:
    lines = horovod.explain(
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "x",
            "HOROVOD_WITHOUT_GLOO": "1",
            "HOROVOD_NEW": "1",
            "HOROVOD_TIMELINE": "x",
            "HOROVOD_RANK": "0",
            "OTHER": "1",
        }
    )
    assert [line.split()[0] for line in lines] == [
        "HOROVOD_AUTOTUNE",
        "HOROVOD_AUTOTUNE_LOG",
        "HOROVOD_NEW",
        "HOROVOD_WITHOUT_GLOO",
    ]
    assert horovod.explain({"HOROVOD_AUTOTUNE": "1", "HORA_JOB": "x"}) == []


def test_what_a_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert horovod.target(["python", "train.py", "--lr", "1"]) == (
        ScriptTarget("train.py"),
        ["--lr", "1"],
        "train",
    )
    target, rest, title = horovod.target(["python", "-m", "package.train", "-x"])
    assert (target.stem, rest, title) == ("train", ["-x"], "train")
    target, rest, title = horovod.target(["sh", "-c", "true"])
    assert Path(rest[0]).name == "sh"
    assert (rest[1:], title) == (["-c", "true"], "sh")


def test_the_package_path_comes_first_and_once() -> None:
    once = horovod.environment({"PYTHONPATH": "/mine"})
    assert once["PYTHONPATH"] == f"{horovod.SHIMS}{os.pathsep}/mine"
    assert horovod.environment(once)["PYTHONPATH"] == once["PYTHONPATH"]
