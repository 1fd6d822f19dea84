"""Bad input: one clear error, nothing on disk, nothing running. And the forms that python accepts."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.launch.conftest import Bench

from hora.cli import main
from hora.core.errors import LaunchError
from hora.launch import Job, ModuleTarget, ScriptTarget, Target
from hora.launch.horovod import target as horovod_target
from hora.launch.job import check, locate, rank_environment


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "trian.py"], ["trian.py does not exist", "Did you mean train.py?"]),
        (["-n", "2", "nowhere/train.py"], ["There is no directory nowhere"]),
        (["-n", "2", "zzz"], ["The scripts in this directory are: train.py"]),
        (["-n", "0", "train.py"], ["0 is not a number of workers"]),
        (["-n", "-3", "train.py"], ["-3 is not a number of workers"]),
        (["-n", "two", "train.py"], ["-n two"]),
        (["-n", "1000000", "train.py"], ["1000000 workers"]),
        (["-n", "2"], ["nothing to run"]),
        (["-n", "2", "empty"], ["empty holds no __main__.py"]),
        (["-n", "2", "empty.zip"], ["empty.zip holds no __main__.py"]),
        (["-n", "2", "-m", "no_such_module"], ["no module no_such_module"]),
        (["-n", "2", "-m", "train.py"], ["Leave out -m"]),
        (["-n", "2", "-m", "pack.nothing"], ["pack.nothing (the package pack exists)"]),
        (["-n", "2", "-m", "pack"], ["pack is a package without __main__"]),
        (["-n", "2", "-m", "a/b.py"], ["'a/b.py' is not the name of a module"]),
        (["--env", "NOVALUE", "train.py"], ["--env NOVALUE", "K=V"]),
        (["--env", "=x", "train.py"], ["K=V"]),
        (["--env", "RANK=3", "train.py"], ["RANK is set by the launcher"]),
        (["--env", "HORA_TIMEUOT=3", "train.py"], ["Did you mean HORA_TIMEOUT?"]),
        (["--env", "HORA_TIMEOUT=soon", "train.py"], ["HORA_TIMEOUT='soon' is not a number"]),
        (["--timeout", "0", "train.py"], ["not a positive number of seconds"]),
        (["--timeout", "nan", "train.py"], ["not a positive number of seconds"]),
        (["--timeout", "x", "train.py"], ["--timeout x"]),
        (["--name", "a/b", "train.py"], ["cannot name a directory"]),
        (["--name", "", "train.py"], ["cannot name a directory"]),
        (["--run-dir", "train.py", "train.py"], ["train.py is a file"]),
        (["--run-dir", "empty/..", "train.py"], ["occupied"]),
    ],
)
def test_bad_input(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    bench.script("raise AssertionError('started')", "train.py")
    for folder in ("empty", "pack"):
        (bench.folder / folder).mkdir()
    (bench.folder / "pack" / "__init__.py").touch()
    zipfile.ZipFile(bench.folder / "empty.zip", "w").close()
    before = sorted(bench.folder.rglob("*"))
    monkeypatch.chdir(bench.folder)
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hora: ")
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err
    assert sorted(bench.folder.rglob("*")) == before


def test_unwritable_run_directory(bench: Bench) -> None:
    locked = bench.folder / "locked"
    locked.mkdir(mode=0o500)
    root = os.geteuid() == 0  # who may write everywhere, but not to a read-only file system
    if root:
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=20m", "tmpfs", str(locked)]
        if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            pytest.skip("a tmpfs cannot be mounted here")
    try:
        ended = bench.run("--run-dir", str(locked / "run"), str(bench.script("print(1)")))
        assert ended.code == 2
        assert "cannot be written" in ended.err
        assert list(locked.iterdir()) == []
    finally:
        if root:
            subprocess.run(["umount", str(locked)], check=True)


def test_a_current_directory_that_is_gone(bench: Bench) -> None:
    gone = bench.folder / "gone"
    gone.mkdir()
    path = bench.script("print(1)")
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m hora.cli run {path}"
    done = subprocess.run(
        command, shell=True, env=bench.environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert "The current directory no longer exists" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_forms_that_python_accepts(bench: Bench) -> None:
    body = "import sys, os; print(__name__, os.path.basename(sys.argv[0]), sys.argv[1:])\n"
    (bench.folder / "plain").write_text(body)
    (bench.folder / "folder").mkdir()
    (bench.folder / "folder" / "__main__.py").write_text(body + "import beside; print(beside.x)")
    (bench.folder / "folder" / "beside.py").write_text("x = 'found'\n")
    with zipfile.ZipFile(bench.folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", body + "import inner; print(inner.x)")
        archive.writestr("inner.py", "x = 'zipped'")
    (bench.folder / "pack").mkdir()
    (bench.folder / "pack" / "__init__.py").touch()
    (bench.folder / "pack" / "tool.py").write_text(body + "from . import data; print(__package__)")
    (bench.folder / "pack" / "data.py").touch()
    (bench.folder / "pack" / "__main__.py").write_text(body)
    name = os.fsencode(bench.folder) + b"/caf\xe9.py"
    with open(name, "wb") as file:  # noqa: PTH123 - a name that is no UTF-8
        file.write(body.encode())
    for index, (arguments, want) in enumerate(
        [
            (["plain", "-n", "9"], ["__main__ plain ['-n', '9']"]),
            (["--", "plain", "--", "x"], ["__main__ plain ['--', 'x']"]),
            (["folder", "a"], ["__main__ folder ['a']", "found"]),
            (["archive.zip"], ["__main__ archive.zip []", "zipped"]),
            (["-m", "pack.tool", "-m", "b"], ["__main__ tool.py ['-m', 'b']", "pack"]),
            (["-m", "pack"], ["__main__ __main__.py []"]),
            ([os.fsdecode(b"caf\xe9.py")], None),
        ]
    ):
        run_dir = str(bench.folder / f"run-{index}")
        ended = bench.run("--run-dir", run_dir, "--no-output-rank-prefix", *arguments)
        assert ended.code == 0, ended.err
        if want is not None:
            assert ended.out.splitlines() == want
        else:
            assert ended.out.startswith("__main__ caf")


def test_python_and_hora_run_give_a_script_the_same_surroundings(bench: Bench) -> None:
    body = """
        names = sorted(name for name in globals() if name not in ("rank",))
        print(names, __file__, __spec__, __package__, __doc__, type(__loader__).__name__)
        print(sys.path, sys.argv, __cached__, __name__)
        print(sys.modules["__main__"].__dict__ is globals(), __builtins__.__name__)
    """
    path = bench.script(body, "same.py")
    environ = bench.environ | {"HORA_RANK": "0"}
    plain = subprocess.run(
        [sys.executable, path.name, "a"],
        cwd=bench.folder,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    ended = bench.run("--no-output-rank-prefix", path.name, "a")
    assert ended.out.splitlines() == plain.stdout.splitlines()


def test_default_run_directory_is_named_after_the_script(bench: Bench) -> None:
    bench.script("print(1)", "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "hora.cli", "run", "train.py"],
        cwd=bench.folder, env=bench.environ, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    (run,) = (bench.folder / "runs").iterdir()
    assert run.name.startswith("train-")
    assert f"run directory runs/{run.name}" in done.stderr


def test_jobs_that_start_in_the_same_moment_get_directories_of_their_own(bench: Bench) -> None:
    path = bench.script("print(1)", "train.py")
    command = [sys.executable, "-m", "hora.cli", "run", "--quiet", str(path)]
    started = [subprocess.Popen(command, cwd=bench.folder, env=bench.environ) for _ in range(6)]
    assert [process.wait(timeout=30) for process in started] == [0] * 6
    assert len(list((bench.folder / "runs").glob("*/run.json"))) == 6


def test_too_few_descriptors_leave_nothing_behind(bench: Bench) -> None:
    bench.environ["TEST_MARK"] = bench.folder.name
    path = bench.script("time.sleep(60)")
    command = f"ulimit -n 40; exec {sys.executable} -m hora.cli run -n 30 {path}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=bench.folder,
        env=bench.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "of 30 workers could be started: Too many open files" in done.stderr
    assert not (bench.folder / "runs").exists()
    assert not bench.marked(bench.folder.name)


def test_the_users_run_dir_setting_is_honoured(bench: Bench) -> None:
    bench.environ["HORA_RUN_DIR"] = str(bench.folder / "chosen")
    path = bench.script("print(1)")
    subprocess.run(
        [sys.executable, "-m", "hora.cli", "run", str(path)], cwd=bench.folder, env=bench.environ, check=True
    )
    assert (bench.folder / "chosen" / "run.json").exists()


def test_threads_per_rank_follow_the_cores_that_the_launcher_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    job = Job(target=ScriptTarget("x.py"), workers=3)
    assert rank_environment(job, {})["OMP_NUM_THREADS"] == "2"
    assert rank_environment(job, {"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"
    many = Job(target=ScriptTarget("x.py"), workers=99, env={"A": "b"})
    assert rank_environment(many, {"RANK": "7", "HORA_TIMEOUT": "9"}) == {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HORA_TIMEOUT": "9",
        "A": "b",
    }


@pytest.mark.parametrize(
    ("target", "arguments", "guard"),
    [
        (ModuleTarget("pytest"), ["test_a.py"], "off"),
        (ModuleTarget("unittest.__main__"), [], "off"),
        (ScriptTarget("/usr/bin/pytest"), [], "off"),
        (horovod_target(["sh", "-c", "exit"])[0], ["/usr/bin/py.test", "-x"], "off"),
        (horovod_target(["sh", "-c", "exit"])[0], ["/bin/sh", "pytest"], None),
        (ModuleTarget("train"), ["pytest"], None),
        (ScriptTarget("pytest_like.py"), [], None),
    ],
)
def test_the_guard_is_off_where_tests_are_run(
    target: Target, arguments: list[str], guard: str | None
) -> None:
    job = Job(target=target, arguments=arguments, workers=2)
    assert rank_environment(job, {}).get("HORA_GUARD") == guard
    assert rank_environment(job, {"HORA_GUARD": "on"})["HORA_GUARD"] == "on"


def test_locating_a_module_runs_nothing(tmp_path: Path) -> None:
    package = tmp_path / "loud"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "part.py").touch()
    found = locate("loud.part", [str(tmp_path)])
    assert found is not None
    assert found.origin == str(package / "part.py")
    assert locate("loud.other", [str(tmp_path)]) is None
    assert locate("loud.part.deeper", [str(tmp_path)]) is None


def test_workers_must_be_a_number() -> None:
    for wrong in (True, 1.5, "2", None):
        with pytest.raises(LaunchError, match="number of workers"):
            check(Job(target=ScriptTarget("x.py"), workers=wrong))  # type: ignore[arg-type]
