"""The board: what a rank writes is what the supervisor reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.guard.board import RING, Board, Entry, Phase

numbers = st.integers(0, 2**64 - 1)


def board(size: int) -> Board:
    fd = Board.make(size)
    try:
        return Board(fd, size)
    finally:
        os.close(fd)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=2 * RING + 3), st.integers(0, 3))
def test_the_last_collectives_are_kept_in_order(rows: list[tuple[int, int, int, int]], rank: int) -> None:
    shown = board(4)
    slot = shown.slot(rank)
    for row in rows:
        slot.enter(*row)
    expected = [Entry(*row) for row in rows[-RING:]]
    assert shown.entries(rank) == expected
    assert list(shown.newest(rank)) == expected[::-1]
    assert shown.head(rank).calls == len(rows)
    for other in set(range(4)) - {rank}:
        assert shown.entries(other) == []
        assert shown.head(other).phase == Phase.ABSENT
    shown.close()


@given(numbers, numbers, st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9))
def test_the_head_holds_what_was_written(
    number: int, step: int, since: float, data: float, waited: float
) -> None:
    shown = board(2)
    slot = shown.slot(1)
    slot.begin(since)
    slot.phase(Phase.WAITING, 3, number, since)
    slot.pace(step, data, waited, since)
    head = shown.head(1)
    assert (head.phase, head.set_id, head.number, head.step) == (Phase.WAITING, 3, number, step)
    assert (head.since, head.data, head.waited, head.stepped, head.began) == (
        since,
        data,
        waited,
        since,
        since,
    )
    shown.close()


def test_what_is_no_board_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no board"):
        Board(-1, 2)
    with (tmp_path / "mine").open("w+b") as file:
        file.write(b"x" * 100_000)
        file.flush()
        with pytest.raises(ValueError, match="is no board of 2 ranks"):
            Board(file.fileno(), 2)
        file.seek(0)
        assert file.read() == b"x" * 100_000


def test_a_slot_travels_to_the_board_of_another_host() -> None:
    """Times are those of the other host's clock, here 100 s ahead; times that are not set stay so."""
    there, here = board(2), board(2)
    slot = there.slot(1)
    for number in range(RING + 3):
        slot.enter(0, number, 7, number)
    slot.phase(Phase.WAITING, 0, 5, 1000.0)
    slot.pace(3, 0.5, 0.25, 0.0)
    copy = there.copy(1)
    assert copy is not None
    here.paste(1, copy, shift=-100.0)
    here.paste(0, b"of another form", shift=0.0)
    assert here.entries(1) == there.entries(1)
    assert here.head(1) == there.head(1)._replace(since=900.0)
    assert here.head(0).phase == Phase.ABSENT
    there.close()
    here.close()
