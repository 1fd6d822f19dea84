"""Whatever happens to a checkpoint's files, it is restored as it was written, or named and passed over."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core import commits
from hora.core.errors import CheckpointError


def state_at(step: int) -> dict[str, Any]:
    return {
        "shared": torch.arange(300_000, dtype=torch.float32) * step,
        "own": torch.full((7,), step + hora.rank()),
        "text": f"step {step}",
    }


def write(directory: Path, *steps: int, size: int = 2) -> None:
    def body() -> None:
        for step in steps:
            hora.save(state_at(step), step, directory=directory, keep=10).wait(20)

    run_ranks(size, body)


def restored(directory: Path) -> int | None:
    """The step that is restored, on a rank; its values are compared."""
    state = state_at(0)
    step = hora.restore(state, directory=directory)
    right = state_at(step or 0)
    assert state["text"] == right["text"]
    assert torch.equal(state["shared"], right["shared"])
    assert torch.equal(state["own"], right["own"])
    return step


def read(directory: Path, size: int = 1) -> int | None:
    """The step that is restored."""
    (step,) = set(run_ranks(size, restored, directory))
    return step


def folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path) -> None:
    kept = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(kept)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    write(directory, 1, 2)
    return directory


FILES = (
    "rank-00000.safetensors",
    "rank-00001.safetensors",
    "rank-00000.json",
    "rank-00001.json",
    "layout.json",
)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (truncated, "is truncated"),
        (longer, "bytes where"),
        (flipped, "checksum differs"),
        (empty, "is truncated: 0 of"),
        (gone, "is missing"),
        (a_folder, "is not a file"),
        (a_link, "is not a file"),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_passed_over(
    pristine: Path, tmp_path: Path, harm: Callable[[Path], None], why: str
) -> None:
    def body() -> None:
        for name in FILES:
            shutil.copytree(pristine, tmp_path / name)
            harm(folder(tmp_path / name, 2) / name)
            with contextlib.redirect_stderr(io.StringIO()) as told:
                assert restored(tmp_path / name) == 1
            assert "hora: A checkpoint is not whole. step-00000002 in" in told.getvalue()
            assert f"{name} " in told.getvalue()
            assert why in told.getvalue()

    run_ranks(1, body)


@pytest.mark.parametrize("harm", [truncated, flipped, empty, gone])
def test_a_damaged_marker_is_passed_over(
    tmp_path: Path, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, 2)
    harm(folder(tmp_path, 2) / "commit.json")
    capfd.readouterr()
    assert read(tmp_path) == 1
    told = capfd.readouterr().err
    assert "step-00000002 in" in told
    assert "commit.json" in told


def test_a_marker_of_another_checkpoint_is_not_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, 2)
    shutil.copy(folder(tmp_path, 1) / "commit.json", folder(tmp_path, 2))
    assert read(tmp_path) == 1
    assert "its commit.json is that of step 1" in capfd.readouterr().err


def test_one_whose_files_are_of_another_number_of_workers_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one", 2, size=1)
    write(tmp_path / "two", 1, 2)
    place = commits.Place(2, 1, folder(tmp_path / "two", 2))
    marker = commits.read(place)
    for name in ("layout.json", "rank-00000.json", "rank-00000.safetensors"):
        shutil.copy(folder(tmp_path / "one", 2) / name, place.path)
    commits.write(place.path, committed(place.path, set(marker.files)))
    assert read(tmp_path / "two") == 1
    assert "its layout.json is of 1 workers, its marker of 2" in capfd.readouterr().err


def test_where_all_are_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    flipped(folder(tmp_path, 1) / FILES[0])
    gone(folder(tmp_path, 2) / FILES[1])
    with pytest.raises(
        AssertionError, match=r"None of the 2 checkpoints .* is whole: of step-00000002, .*is missing"
    ):
        read(tmp_path)


def test_where_none_was_completed_there_is_none(tmp_path: Path) -> None:
    write(tmp_path, 1)
    gone(folder(tmp_path, 1) / "commit.json")
    assert read(tmp_path, size=2) is None


HARMS = st.lists(
    st.tuples(
        st.sampled_from((*FILES, "commit.json")),
        st.sampled_from(("flip", "cut", "zeros", "insert", "swap")),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 5000),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=3,
)


def test_random_damage_is_always_noticed(pristine: Path, tmp_path: Path) -> None:
    path = folder(tmp_path / "c", 2)
    shutil.copytree(pristine, tmp_path / "c")
    before = {name: (path / name).read_bytes() for name in (*FILES, "commit.json")}

    @settings(max_examples=60, deadline=None, database=None)
    @given(HARMS)
    def property_(harms: list[tuple[str, str, float, int, int]]) -> None:
        for name, data in before.items():
            (path / name).write_bytes(data)
        for name, *harm in harms:
            (path / name).write_bytes(damaged((path / name).read_bytes(), *harm))
        same = all((path / name).read_bytes() == data for name, data in before.items())
        assert restored(tmp_path / "c") == (2 if same else 1)

    run_ranks(1, property_)


def damaged(whole: bytes, kind: str, where: float, length: int, bit: int) -> bytes:
    data = bytearray(whole)
    place = int(where * len(data))
    if kind == "flip" and data:
        data[place] ^= 1 << bit
    elif kind == "cut":
        del data[place : place + length]
    elif kind == "zeros":
        data[place : place + length] = bytes(len(data[place : place + length]))
    elif kind == "insert":
        data[place:place] = os.urandom(length)
    else:
        data[place:] = data[place:][::-1]
    return bytes(data)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_hostile_checkpoint_runs_no_code(pristine: Path, tmp_path: Path) -> None:
    """Its markers are right, since whoever makes it can make them: each file in turn is a pickle."""
    fired = tmp_path / "fired"
    bombs = [pickle.dumps(_Bomb(fired), protocol=protocol) for protocol in (0, 2, 5)]
    torch.save(_Bomb(fired), tmp_path / "bomb.pt")
    bombs.append((tmp_path / "bomb.pt").read_bytes())
    pickle.loads(bombs[0])
    assert fired.exists(), "the bomb is one"
    fired.unlink()

    def body() -> None:
        for name in (*FILES, "commit.json", ".metadata"):
            shutil.copytree(pristine, tmp_path / name)
            place = commits.Place(2, 1, folder(tmp_path / name, 2))
            marker = commits.read(place)
            for bomb in bombs:
                (place.path / name).write_bytes(bomb)
                if name != "commit.json":
                    commits.write(place.path, committed(place.path, {*marker.files, name}))
                with contextlib.suppress(CheckpointError):
                    # The bytes of a tensor are any bytes, so that some are restored.
                    hora.restore(state_at(0), directory=tmp_path / name)
                assert not fired.exists(), name

    run_ranks(1, body)


def committed(path: Path, names: set[str]) -> commits.Commit:
    """A marker with the right checksums of whatever the files are now."""
    files = {name: ((path / name).stat().st_size, commits.digest_of(path / name)) for name in names}
    return commits.Commit(step=2, world=2, files=files, time=0.0)


def test_a_hostile_marker_leads_nowhere_else(tmp_path: Path) -> None:
    write(tmp_path, 1)
    place = commits.Place(1, 1, folder(tmp_path, 1))
    commit = commits.read(place)
    for name in ("../../etc/passwd", "/etc/passwd", "..", ""):
        files = {**commit.files, name: (1, "0" * 64)}
        commits.write(place.path, commits.Commit(step=1, world=2, files=files, time=0.0))
        with pytest.raises(commits.DamagedError):
            commits.read(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout["tensors"]["shared"].update(dtype="save"),
        lambda layout: layout["tensors"]["shared"].update(shape=[-300_000]),
        lambda layout: layout["tensors"]["shared"].update(shape=[10**15]),
        lambda layout: layout["tensors"]["shared"]["chunks"][0].__setitem__(
            2, "../step-00000001/layout.json"
        ),
        lambda layout: layout["tensors"]["shared"]["chunks"][0].__setitem__(3, 10**12),
        lambda layout: layout["tensors"]["shared"]["chunks"][0].__setitem__(4, 8),
        lambda layout: layout["tensors"]["shared"].update(chunks=[]),
        lambda layout: layout.update(tensors=[]),
        lambda layout: layout.update(world="2"),
    ],
)
def test_a_layout_that_cannot_be_is_named(tmp_path: Path, change: Callable[[Any], None]) -> None:
    from hora.torch.checkpoint import _layout

    write(tmp_path, 1)
    place = commits.Place(1, 1, folder(tmp_path, 1))
    commit = commits.read(place)
    layout = json.loads((place.path / "layout.json").read_bytes())
    _layout.parse(json.dumps(layout).encode(), commit)
    change(layout)
    with pytest.raises(commits.DamagedError, match=r"its layout.json (cannot be used|is of 2 workers)"):
        _layout.parse(json.dumps(layout).encode(), commit)
