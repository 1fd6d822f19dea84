"""The run directory: made whole or not at all."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.core import rundir
from hora.core.errors import DiskFullError, RunDirectoryError
from hora.core.rundir import RunDirectory


def test_create_makes_the_folders_and_run_json(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "a", about={"workers": 2})
    assert run.about()["workers"] == 2
    assert run.log(3).parent.is_dir()
    assert run.failure(0).parent.is_dir()
    assert run.events(0).parent.is_dir()


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path).about()["created"] > 0


def test_an_occupied_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunDirectoryError, match=r"is occupied by a run of 2\d{3}-.*--run-dir PATH"):
        RunDirectory.create(run.path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="is occupied"):
        RunDirectory.create(tmp_path / "b")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "b", tmp_path / "b" / "thesis.tex"])


def test_of_two_jobs_at_the_same_moment_one_gets_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_and_then_lose_the_race(path: Path) -> None:
        check(path)
        monkeypatch.setattr(rundir, "_check_vacant", check)
        RunDirectory.create(path, about={"winner": True})

    check = rundir._check_vacant
    monkeypatch.setattr(rundir, "_check_vacant", check_and_then_lose_the_race)
    with pytest.raises(RunDirectoryError, match="is occupied by a run of"):
        RunDirectory.create(tmp_path / "runs" / "a")
    assert RunDirectory.open(tmp_path / "runs" / "a").about()["winner"] is True


def test_a_failed_start_takes_back_only_its_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: RunDirectory, **_: object) -> None:
        RunDirectory.create(tmp_path / "runs" / "b", about={})
        raise RunDirectoryError("run.json cannot be written.", fix="Look elsewhere.")

    describe = RunDirectory.describe
    monkeypatch.setattr(
        RunDirectory, "describe", lambda run, **k: (fail if run.path.name == "a" else describe)(run, **k)
    )
    with pytest.raises(RunDirectoryError, match=r"run\.json cannot be written"):
        RunDirectory.create(tmp_path / "runs" / "a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="cannot be written: Not a directory"):
        RunDirectory.create(tmp_path / "a" / "b")


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system of its own, mounted with the options given as parameter."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("mounted", ["size=4m"], indirect=True)
def test_a_full_disk_is_said_before_anything_is_written(mounted: Path) -> None:
    with pytest.raises(DiskFullError, match=r"Only 4\.0 MB are free"):
        RunDirectory.create(mounted / "runs" / "a")
    assert not any(mounted.iterdir())


@pytest.mark.parametrize("mounted", ["ro"], indirect=True)
def test_an_unwritable_place_is_said_before_anything_is_written(mounted: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot be written: .*--run-dir PATH"):
        RunDirectory.create(mounted / "runs" / "a")
    assert not any(mounted.iterdir())


@pytest.mark.parametrize("mounted", ["size=20m"], indirect=True)
def test_a_disk_that_fills_up_later_is_named(mounted: Path) -> None:
    run = RunDirectory.create(mounted / "a")
    run.append_metrics({"step": 1})
    with (mounted / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while True:
            ballast.write(bytes(4096))
    with pytest.raises(DiskFullError, match="The disk is full"):
        run.append_metrics({"text": "x" * 2**16})
    assert run.metrics.read_text() == '{"step": 1}\n'  # no half line in the way of later ones
    with pytest.raises(DiskFullError, match="The disk is full"):
        run.describe(text="x" * 2**16)
    assert "created" in run.about()
    assert not list(run.path.glob("*.new"))


def test_a_failed_description_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "a", about={"workers": 1})

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "run.json")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunDirectoryError, match="Permission denied"):
        run.describe(workers=2)
    assert run.about()["workers"] == 1


def test_open_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run.json"):
        RunDirectory.open(tmp_path)
    RunDirectory.create(tmp_path / "a").run_json.write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        RunDirectory.open(tmp_path / "a").about()


def test_metrics_read_back_without_a_half_written_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    assert run.read_metrics() == []
    run.append_metrics({"step": 1, "loss": 2.5})
    run.append_metrics({"step": 2, "loss": 2.25})
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    assert run.read_metrics() == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]


def test_what_lies_behind_the_step_from_which_a_run_goes_on_is_taken_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    run.rewind_metrics(3)
    assert not run.metrics.exists()
    for step in (5, 10, 15):
        run.append_metrics({"step": step, "loss": 1 / step})
    with run.metrics.open("a") as file:
        file.write('{"step": 20, "lo')
    run.rewind_metrics(10)
    assert run.metrics.read_text().count("\n") == 2
    run.append_metrics({"step": 15, "loss": 0.5})
    assert [record["step"] for record in run.read_metrics()] == [5, 10, 15]
    before = run.metrics.stat()
    run.rewind_metrics(15)
    assert run.metrics.stat() == before
    run.rewind_metrics(0)
    assert run.read_metrics() == []


def test_each_attempt_has_its_own_logs_and_whole_lines_of_metrics(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    run.append_metrics({"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    second = run.again()
    assert (run.attempt, second.attempt) == (1, 2)
    assert run.log(1) == tmp_path / "a" / "logs" / "rank-1.log"
    assert second.log(1) == tmp_path / "a" / "logs" / "attempt-2" / "rank-1.log"
    assert second.failure(0).parent.is_dir()
    second.append_metrics({"step": 2})
    assert second.read_metrics() == [{"step": 1}, {"step": 2}]
    assert second.again().log(0).parent.name == "attempt-3"


def test_default_paths_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundir.time, "strftime", lambda *_: "20260102-030405")
    first = rundir.default_path("resnet")
    assert first == Path("runs/resnet-20260102-030405")
    RunDirectory.create(first)
    assert rundir.default_path("resnet") == Path("runs/resnet-20260102-030405-2")


def test_run_json_is_plain_json(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", about={"path": tmp_path, "workers": 2})
    assert json.loads(run.run_json.read_text())["path"] == str(tmp_path)


def test_a_verdict_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    for line in ("first\n", "second\n"):
        run.append_verdict(line)
    run.replace_verdict("first\n", "first, to the end\n")
    assert run.verdicts.read_text() == "second\nfirst, to the end\n"
