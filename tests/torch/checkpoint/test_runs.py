"""Checkpoints of whole runs: full disks, two runs in one directory, old ones removed, the command line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks

import hora.torch as hora
from hora.cli import main
from hora.core import commits
from hora.core.errors import CheckpointError
from hora.core.lock import DirectoryLock

SOURCE = Path(__file__).parents[3] / "src"
MB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB of its own, unmounted at the end."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this container does not let root mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def state_at(step: int) -> dict[str, Any]:
    return {"x": torch.full((500_000,), float(step)), "step": step}  # 2 MB, shared out among the ranks


def whole(directory: Path) -> list[int]:
    """The steps of the checkpoints that are whole."""
    found = []
    for place in commits.places(directory):
        with contextlib.suppress(commits.DamagedError):
            if commits.problem_of(place.path, commits.read(place)) is None:
                found.append(place.step)
    return found


def test_on_a_full_disk_training_goes_on_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    def body() -> str:
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            hora.save(state_at(1), 1, directory=small_disk).wait(20)
            hora.barrier()
            if hora.rank() == 0:
                (small_disk / "ballast").write_bytes(bytes(3 * MB))
            hora.barrier()
            for step in (2, 3):
                save = hora.save(state_at(step), step, directory=small_disk)
                with pytest.raises(
                    CheckpointError, match=rf"step {step} was not written: .*No space left on device"
                ):
                    save.wait(20)
                assert save.done
                assert "No space left" in (save.error or "")
                assert whole(small_disk) == [1]
                state = state_at(0)
                assert hora.restore(state, directory=small_disk) == 1
                assert torch.equal(state["x"], state_at(1)["x"])
            hora.barrier()
            if hora.rank() == 0:
                assert sorted(path.name for path in small_disk.glob("step-*")) == ["step-00000001"]
                (small_disk / "ballast").unlink()
            hora.barrier()
            hora.save(state_at(4), 4, directory=small_disk).wait(20)
            assert whole(small_disk) == [4, 1]
        return told.getvalue()

    first, second = run_ranks(2, body)
    assert first.count("A checkpoint could not be written.") == 1
    assert "The checkpoint of step 2 could not be written" in first
    assert "No space left on device. Training goes on" in first
    assert second == ""


FULL = """
import contextlib, sys
from pathlib import Path
import torch, hora.torch as hora
from hora.core.errors import CheckpointError

hora.init()
torch.manual_seed(0)
model = torch.nn.Linear(1000, 500)                                    # 2 MB
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
hora.broadcast_parameters(model)
checkpoints = hora.Checkpoints({"model": model, "optimizer": optimizer}, every=2)
print("restored", checkpoints.restore())
for step in range(1, 9):
    optimizer.zero_grad()
    model(torch.ones(2, 1000)).square().mean().backward()
    optimizer.step()
    checkpoints.step()
    if step % 2 == 0:
        with contextlib.suppress(CheckpointError):
            checkpoints.last.wait(20)
        hora.barrier()
        if step == 2 and hora.rank() == 0:
            Path(sys.argv[1], "ballast").write_bytes(bytes(3 * 2**20))
        hora.barrier()
print("trained")
"""


def test_a_job_goes_on_from_another_and_ends_well_though_its_disk_fills_up(
    small_disk: Path, tmp_path: Path
) -> None:
    def first() -> None:
        model = torch.nn.Linear(1000, 500)
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
        state = {"model": model, "optimizer": optimizer}
        hora.save(state, 8, directory=tmp_path / "one" / "checkpoints").wait(20)

    run_ranks(1, first)
    (tmp_path / "train.py").write_text(FULL)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    options = ["--run-dir", "run", "--checkpoints", str(small_disk / "c"), "--resume", "one"]
    ended = subprocess.run(
        [sys.executable, "-m", "hora.cli", "run", "-n", "2", *options, "train.py", str(small_disk)],
        check=False,
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("restored 8") == 2
    assert ended.stdout.count("trained") == 2
    assert whole(tmp_path / "one" / "checkpoints") == [8]
    verdicts = [json.loads(line) for line in (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()]
    failed = [verdict for verdict in verdicts if verdict["kind"] == "checkpoint-failed"]
    assert [(verdict["step"], verdict["ranks"]) for verdict in failed] == [(12, [0])]
    assert "No space left on device" in failed[0]["text"]
    assert ended.stdout.count("A checkpoint could not be written") == 1
    assert whole(small_disk / "c") == [10]


def test_two_runs_in_one_directory_are_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(CheckpointError) as raised:
            hora.save({"x": 1}, 1, directory=tmp_path)
        with pytest.raises(CheckpointError, match="written by another run"):
            hora.Checkpoints({"x": 1}, directory=tmp_path)
        assert hora.restore({"x": 1}, directory=tmp_path) is None  # reading, as an evaluation does, is free
        return str(raised.value)

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            DirectoryLock.take(tmp_path, {"run": "runs/first"})
            os.write(writer, b"held")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reader, 4) == b"held"
        first, second = run_ranks(2, refused)
        assert f"are written by another run: run runs/first, process {pid} on " in first
        assert "--checkpoints DIR" in first
        assert "--resume DIR" in first
        assert "written by another run" in second
        assert commits.places(tmp_path) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)

    def free() -> int | None:
        hora.save({"x": 1}, 1, directory=tmp_path).wait(20)
        return hora.restore({"x": 0}, directory=tmp_path)

    assert run_ranks(2, free) == [1, 1]


def test_the_lock_is_not_inherited_and_is_given_back(tmp_path: Path) -> None:
    lock = DirectoryLock.take(tmp_path, {})
    assert DirectoryLock.take(tmp_path, {}) is lock
    assert not os.get_inheritable(lock._descriptor)
    assert _taken(tmp_path)
    lock.release()
    assert not _taken(tmp_path)


def _taken(directory: Path) -> bool:
    """Whether another process could not take the lock."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            with (directory / "lock").open("r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            code = 0
        except OSError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 1


def test_old_checkpoints_go_when_newer_ones_are_committed(tmp_path: Path) -> None:
    def body() -> None:
        for step in range(1, 11):
            save = hora.save({"x": step}, step, directory=tmp_path, keep=2, keep_every=4)
        save.wait(20)

    run_ranks(2, body)
    assert whole(tmp_path) == [10, 9, 8, 4]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("step-")] == ["lock"]


def test_the_end_of_a_job_waits_until_its_last_checkpoint_is_committed(tmp_path: Path) -> None:
    def body() -> None:
        hora.save({"x": torch.ones(3_000_000)}, 1, directory=tmp_path)

    run_ranks(3, body)
    assert whole(tmp_path) == [1]


def test_what_counts_when_old_ones_are_removed(tmp_path: Path) -> None:
    """5 was not completed, 4 is damaged, 3 was saved twice: good are 6, 3 (the second), 2 and 1."""
    for step, attempt in ((1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (5, 1), (6, 1)):
        place = commits.place_of(tmp_path, step, attempt)
        place.path.mkdir()
        if step != 5:
            commits.write(place.path, commits.Commit(step=step, world=1, files={}, time=0.0))
    damaged = {commits.place_of(tmp_path, 4, 1).path}
    flight = commits.place_of(tmp_path, 7, 1).path
    flight.mkdir()
    gone = commits.prune(commits.places(tmp_path), keep=2, damaged=damaged, spare={flight})
    assert [(place.step, place.attempt) for place in gone] == [(5, 1), (3, 1), (2, 1), (1, 1)]
    gone = commits.prune(commits.places(tmp_path), keep=1, damaged=damaged, spare={flight})
    assert [(place.step, place.attempt) for place in gone] == [(4, 1), (3, 2)]
    assert commits.prune(commits.places(tmp_path), keep=1, spare={flight}) == []


def test_a_step_that_is_saved_again_does_not_touch_the_first_before_it_is_whole(tmp_path: Path) -> None:
    def body() -> str:
        hora.save({"x": "old"}, 5, directory=tmp_path).wait(20)
        path = hora.save({"x": "new"}, 5, directory=tmp_path).wait(20)
        state = {"x": ""}
        assert hora.restore(state, directory=tmp_path) == 5
        assert state == {"x": "new"}
        return path.name

    assert run_ranks(1, body) == ["step-00000005-2"]
    assert whole(tmp_path) == [5]


def test_checkpoints_saves_every_so_many_steps_and_goes_on_counting(tmp_path: Path) -> None:
    def body() -> None:
        state = {"x": torch.zeros(())}
        checkpoints = hora.Checkpoints(state, every=3, keep=9, directory=tmp_path)
        assert checkpoints.restore() is None
        for _ in range(7):
            state["x"] += 1
            checkpoints.step()
        checkpoints.save().wait(20)
        assert whole(tmp_path) == [7, 6, 3]
        state["x"].zero_()
        again = hora.Checkpoints(state, every=3, directory=tmp_path)
        assert again.restore() == again.steps == 7
        assert state["x"].item() == 7

    run_ranks(2, body)


def test_wrong_use_is_told_with_the_line_to_write(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(CheckpointError, match="Nothing says where checkpoints go"):
            hora.save({}, 1)
        for words in ({"every": 0}, {"keep": 0}, {"keep_every": True}):
            with pytest.raises(CheckpointError, match="Write"):
                hora.Checkpoints({}, directory=tmp_path, **words)
        with pytest.raises(CheckpointError, match="step=1.5 is not a number of steps"):
            hora.save({}, 1.5, directory=tmp_path)  # type: ignore[arg-type]

    run_ranks(1, body)
    with pytest.raises(AssertionError, match=r"HORA_RESUME=.*there is no such directory"):
        run_ranks(1, lambda: hora.restore({}, directory=tmp_path), resume=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssertionError, match=r"HORA_RESUME=.*there is no checkpoint"):
        run_ranks(1, lambda: hora.restore({}, directory=tmp_path), resume=tmp_path / "empty")


def test_the_setting_is_used_and_the_argument_comes_first(tmp_path: Path) -> None:
    def body() -> None:
        hora.save({"x": 1}, 1).wait(20)
        hora.save({"x": 1}, 2, directory=tmp_path / "b").wait(20)

    run_ranks(1, body, checkpoints=tmp_path / "a")
    assert (whole(tmp_path / "a"), whole(tmp_path / "b")) == ([1], [2])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        torch.nn.init.constant_(model[0].weight, 0.5)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer = hora.DistributedOptimizer(optimizer, model, shard="optimizer")
        for step in (1, 2):
            model(torch.ones(4, 3) * (1 + hora.rank())).sum().backward()
            optimizer.step()
            hora.save({"model": model, "optimizer": optimizer}, step, directory=tmp_path / "c").wait(20)

    run_ranks(2, body)
    return tmp_path / "c"


def test_list_and_check(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(directory)]) == 0
    assert capsys.readouterr().out.count("2 workers") == 2
    assert main(["checkpoint", "check", str(directory)]) == 0
    assert capsys.readouterr().out.count("whole\n") == 2
    with (directory / "step-00000001" / "layout.json").open("a") as file:
        file.write(" ")
    assert main(["checkpoint", "check", str(directory)]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("step-00000002")
    assert good.endswith("whole")
    assert bad.startswith("step-00000001")
    assert "layout.json has" in bad
    assert main(["checkpoint", "list", str(directory / "nothing")]) == 2
    (directory / "empty").mkdir()
    assert main(["checkpoint", "list", str(directory / "empty")]) == 1


def test_export_to_a_plain_state_dict(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = directory / "model.pt"
    assert main(["checkpoint", "export", str(directory), "-o", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    plain = torch.load(file, weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.load_state_dict(plain)
    assert model[1].num_batches_tracked.item() == 2
    assert main(["checkpoint", "export", str(directory), "-o", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    everything = directory / "all.pt"
    command = [
        "checkpoint",
        "export",
        str(directory / "step-00000001"),
        "--key",
        "all",
        "-o",
        str(everything),
    ]
    assert main(command) == 0
    held = torch.load(everything, weights_only=True)
    assert held["model"]["1.num_batches_tracked"].item() == 1
    assert held["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (2, 3)
    assert held["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_export_to_safetensors(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = directory / "model.safetensors"
    shutil.rmtree(directory / "step-00000002" / "gone", ignore_errors=True)
    os.truncate(directory / "step-00000002" / "layout.json", 5)
    assert main(["checkpoint", "export", str(directory), "-o", str(file)]) == 0
    assert "step-00000002 is passed over: layout.json is truncated" in capsys.readouterr().err
    tensors = safetensors.load_file(file)
    assert tensors["0.weight"].shape == (2, 3)
    assert tensors["1.num_batches_tracked"].item() == 1
    # The checkpoint's own files are of that format too.
    parts = [
        safetensors.load_file(directory / "step-00000001" / f"rank-0000{rank}.safetensors") for rank in (0, 1)
    ]
    assert torch.equal((parts[0] | parts[1])["model/0.weight"], tensors["0.weight"])


def test_without_safetensors_the_line_to_write_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["checkpoint", "export", str(directory), "-o", str(directory / "m.safetensors")]) == 2
    assert "pip install 'hora[safetensors]'" in capsys.readouterr().err


def test_hora_run_tells_a_wrong_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resume", "/nowhere", "train.py"]) == 2
    assert "--resume /nowhere: there is no such directory" in capsys.readouterr().err


def test_kills_while_checkpoints_are_written(tmp_path: Path) -> None:
    """A few of what ``benchmarks/checkpoint_kills.py`` does a hundred times."""
    import checkpoint_kills

    counts = checkpoint_kills.kill_many(6, seed=1, directory=tmp_path / "c", tell=lambda text: None)
    assert counts["kills"] == 6
    assert counts["partial"] > 0
