"""Where each rank is: its last collective in every process set, kept between two looks at the board."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from hora.guard.board import RING, Board, Entry, Head, Phase

__all__ = ["Places"]


class Places:
    """What the board shows, read once per look.

    Args:
        board: what the ranks write.

    Attributes:
        heads: what each rank was doing at the last look.
    """

    def __init__(self, board: Board) -> None:
        self.heads: Sequence[Head] = board.heads()
        self._board = board
        self._members: dict[int, list[int]] = {0: list(range(board.size))}
        self._last: list[dict[int, Entry]] = [{} for _ in range(board.size)]
        self._sets_of = [1] * board.size  # how many process sets each rank is in
        self._read = [0] * board.size  # calls of each rank that were looked at

    def look(self) -> None:
        """Read what the ranks do now, and what they entered since the last look."""
        self.heads = self._board.heads()
        for rank, head in enumerate(self.heads):
            if head.calls != self._read[rank]:
                self._catch_up(rank, head.calls)

    def declare(self, set_id: int, members: Iterable[int]) -> None:
        """Take in the members of a process set."""
        if set_id in self._members:
            return
        self._members[set_id] = sorted(set(members))
        for rank in self._members[set_id]:  # it may have been used already
            self._sets_of[rank] += 1
            self._read[rank] = 0

    @property
    def sets(self) -> Mapping[int, Sequence[int]]:
        """The members of each process set."""
        return self._members

    def members(self, set_id: int) -> Sequence[int]:
        """The ranks of a process set."""
        return self._members.get(set_id, self._members[0])

    def entry(self, rank: int, set_id: int, number: int) -> Entry | None:
        """A rank's collective of this number; None when it has not come to it, or the board has lost it."""
        last = self._last[rank].get(set_id)
        if last is None or last.number < number:
            return None
        if last.number == number:
            return last
        for entry in self._board.newest(rank):
            if entry.set_id == set_id and entry.number <= number:
                return entry if entry.number == number else None
        return None

    def last(self, rank: int, set_id: int) -> int:
        """The number of a rank's last collective of this process set; 0: it has made none."""
        entry = self._last[rank].get(set_id)
        return 0 if entry is None else entry.number

    def missing(self, set_id: int, number: int) -> list[int]:
        """Members that have not come to this collective."""
        return [rank for rank in self.members(set_id) if self.last(rank, set_id) < number]

    def waiting(self, *, without: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Ranks inside a collective: its process set and number. Those that have ended are to be left out."""
        ended = set(without)
        return {
            rank: (head.set_id, head.number)
            for rank, head in enumerate(self.heads)
            if head.phase in (Phase.WAITING, Phase.CHECKING) and rank not in ended
        }

    def _catch_up(self, rank: int, calls: int) -> None:
        last = self._last[rank]
        new = calls - self._read[rank]
        found: set[int] = set()
        for entry in itertools.islice(self._board.newest(rank), new if 0 < new < RING else RING):
            if entry.set_id not in found:
                found.add(entry.set_id)
                last[entry.set_id] = entry
                if len(found) == self._sets_of[rank]:
                    break
        self._read[rank] = calls
