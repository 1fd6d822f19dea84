"""Who is alone in the room, and who waits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.room import Room


def test_who_wants_to_be_alone_waits_for_the_others_and_who_comes_later_waits_for_it(tmp_path: Path) -> None:
    room, story = Room(tmp_path), tmp_path / "story"
    with room.entered(), room.entered():
        with_us = _process(tmp_path, story, "with us", alone=False)
        assert os.waitpid(with_us, 0)[1] == 0
        first = _process(tmp_path, story, "alone", alone=True)
        _until_it_waits(first, tmp_path / "room")
        second = _process(tmp_path, story, "later", alone=False)
        _until_it_waits(second, tmp_path / "turnstile")
        _tell(story, "we go")
    for process in (first, second):
        assert os.waitpid(process, 0)[1] == 0
    assert story.read_text().split("\n") == ["with us", "we go", "alone", "later", ""]
    room.close()


def _process(folder: Path, story: Path, name: str, *, alone: bool) -> int:
    """A process that comes in, tells so, and ends."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with Room(folder).entered(alone=alone):
                _tell(story, name)
            code = 0
        finally:
            os._exit(code)
    return process


def _tell(story: Path, name: str) -> None:
    with story.open("a") as file:
        print(name, file=file)


def _until_it_waits(process: int, file: Path) -> None:
    """The kernel's list of locks shows who waits for which file."""
    waits = f"{process} {_device(file)}:{file.stat().st_ino} "
    deadline = time.monotonic() + 20
    while not any(" -> " in line and waits in line for line in Path("/proc/locks").read_text().splitlines()):
        if time.monotonic() > deadline:
            pytest.fail(f"process {process} does not wait for {file}")
        time.sleep(0.005)


def _device(file: Path) -> str:
    number = file.stat().st_dev
    return f"{os.major(number):02x}:{os.minor(number):02x}"
