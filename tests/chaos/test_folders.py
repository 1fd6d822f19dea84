"""Checkpoints are heard of the moment they are begun and committed, and damaged ones are passed over."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.chaos.acts import newest, spoil
from hora.chaos.folders import Folders, Saved
from hora.core import commits


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    folders = Folders(tmp_path)
    yield folders
    folders.close()


def waited(folders: Folders) -> list[Saved]:
    poll = select.poll()
    poll.register(folders.fileno(), select.POLLIN)
    assert poll.poll(2000), "nothing was heard"
    return folders.read()


def commit(directory: Path, step: int) -> commits.Place:
    """A small checkpoint of one file."""
    place = commits.free_place(directory, step)
    place.path.mkdir(parents=True)
    (place.path / "rank-00000.safetensors").write_bytes(bytes(range(200)))
    size, digest = 200, commits.digest_of(place.path / "rank-00000.safetensors")
    files = {"rank-00000.safetensors": (size, digest)}
    commits.write(place.path, commits.Commit(step=step, world=1, files=files, time=time.time()))
    return place


def test_each_is_heard_once_and_in_order(tmp_path: Path, folders: Folders) -> None:
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert waited(folders) == [Saved("saving", "step-00000010")]
    (tmp_path / "checkpoints" / "step-00000010" / "rank-00000.json").write_text("{}")
    assert waited(folders) == []
    draft = tmp_path / "checkpoints" / "step-00000010" / "commit.json.new"
    draft.write_text("{}")
    draft.rename(draft.with_name("commit.json"))
    assert waited(folders) == [Saved("saved", "step-00000010")]
    commit(tmp_path / "checkpoints", 20)
    assert waited(folders) == [Saved("saving", "step-00000020"), Saved("saved", "step-00000020")]
    (tmp_path / "other").mkdir()
    assert waited(folders) == []
    assert [Saved("saved", name).step for name in ("step-00000020", "step-00000020-2")] == [20, 20]


def test_what_is_there_before_the_watch_is_heard_too(tmp_path: Path, folders: Folders) -> None:
    """The folder of checkpoints, and a first one in it, may come faster than they are watched."""
    commit(tmp_path / "checkpoints", 5)
    assert waited(folders) == [Saved("saving", "step-00000005"), Saved("saved", "step-00000005")]


def test_damage_of_every_kind_is_seen(tmp_path: Path) -> None:
    told = set()
    for choice in range(40):
        folder = tmp_path / str(choice)
        good, last = commit(folder, 10), commit(folder, 20)
        assert newest(folder) == last
        what = spoil(folder, choice / 40 + 1 / 97)
        assert what is not None
        assert "of checkpoint step-00000020" in what
        assert newest(folder) == good
        told.add(what.split(" is ")[1].split(" from ")[0])
    assert told == {"removed", "truncated", "flipped"}


def test_nothing_is_damaged_that_there_is_no_other_one_for(tmp_path: Path) -> None:
    assert spoil(tmp_path, 0.5) is None
    only = commit(tmp_path, 10)
    assert spoil(tmp_path, 0.5) is None
    assert newest(tmp_path) == only
