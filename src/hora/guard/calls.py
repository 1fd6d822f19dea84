"""Do all ranks call the same collectives? The verdicts ``mismatched-calls`` and ``subset-call``.

A rank that makes a call of a new kind asks before it starts, and goes on when every member of the process
set was seen to make an equal call at the same place of the set's sequence. Calls of a known kind are
only written on the board, with a running hash of all before them, which is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hora.guard.board import Entry, Phase
from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Call", "Calls"]

FIELDS = ("collective", "name", "dtype", "shape", "operation", "root", "factors", "process set")
"""What must be equal on all ranks, in the order in which a difference is told."""


@dataclass(frozen=True)
class Call:
    """One kind of call, as a rank described it.

    Attributes:
        signature: what must be equal on all ranks, by the names of :data:`FIELDS`.
        text: the call in words.
        where: ``file:line`` of the user's line; None if there is none.
        condition: the condition on the rank under which that line stands, as ``if rank == 0 (file:line)``.
    """

    signature: Mapping[str, Any]
    text: str
    where: str | None = None
    condition: str | None = None

    @property
    def site(self) -> str:
        """The call in words, with its line."""
        return f"{self.text} at {self.where}" if self.where else self.text


UNKNOWN = Call({}, "an unknown collective")


@dataclass
class _Check:
    opened: float | None = None
    asked: set[int] = field(default_factory=set)


class Calls:
    """Compares the ranks' sequences of collectives."""

    kinds = frozenset({"call", "check", "set"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._known: list[dict[int, Call]] = [{} for _ in range(judge.size)]
        self._members: dict[int, list[int]] = {0: list(range(judge.size))}
        self._checks: dict[tuple[int, int], _Check] = {}
        self._compared: dict[int, int] = {}
        self._circle: tuple[Any, ...] | None = None

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        if record["kind"] == "call":
            self._known[rank][int(record["id"])] = Call(
                dict(record["signature"]), str(record["text"]), record.get("where"), record.get("condition")
            )
        elif record["kind"] == "set":
            self._members[int(record["set"])] = [int(member) for member in record["members"]]
        else:
            place = int(record["set"]), int(record["number"])
            self._checks.setdefault(place, _Check()).asked.add(rank)
            self._settle(place)

    def ended(self, rank: int) -> None:
        self.tick(0.0)

    def tick(self, now: float) -> None:
        for place in list(self._checks):
            self._settle(place)
        self._compare()
        self._find_deserted()
        self._find_circle()

    def members(self, set_id: int) -> list[int]:
        """The ranks of a process set."""
        return self._members.get(set_id, self._members[0])

    def call(self, rank: int, entry: Entry | None) -> Call:
        """The call that an entry of the board stands for."""
        return UNKNOWN if entry is None else self._known[rank].get(entry.call, UNKNOWN)

    def entry(self, rank: int, set_id: int, number: int) -> Entry | None:
        """A rank's collective of this number, while the board still has it."""
        for entry in self._judge.board.newest(rank):
            if entry.set_id == set_id:
                if entry.number == number:
                    return entry
                if entry.number < number:
                    return None
        return None

    def last(self, rank: int, set_id: int) -> int:
        """The number of a rank's last collective of this process set; 0: none that the board still has."""
        for entry in self._judge.board.newest(rank):
            if entry.set_id == set_id:
                return entry.number
        return 0

    def missing(self, set_id: int, number: int) -> list[int]:
        """Members that have not come to this collective."""
        return [rank for rank in self.members(set_id) if self.last(rank, set_id) < number]

    def waiting(self) -> dict[int, tuple[int, int]]:
        """Ranks inside a collective: its process set and number."""
        ended = self._judge.gone | self._judge.dead
        heads = ((rank, self._judge.board.head(rank)) for rank in range(self._judge.size) if rank not in ended)
        return {
            rank: (head.set_id, head.number)
            for rank, head in heads
            if head.phase in (Phase.WAITING, Phase.CHECKING)
        }

    def _settle(self, place: tuple[int, int]) -> None:
        set_id, number = place
        check = self._checks[place]
        seen = {rank: self.entry(rank, set_id, number) for rank in self.members(set_id)}
        calls = {rank: self.call(rank, entry) for rank, entry in seen.items() if entry is not None}
        signatures = [call.signature for call in calls.values()]
        if any(signature != signatures[0] for signature in signatures):
            self._mismatch(calls)
        elif len(calls) < len(seen):
            self._judge.urgent = True
        else:
            for rank in check.asked:
                self._judge.desk.send(rank, {"kind": "clear", "set": set_id, "number": number})
            del self._checks[place]

    def _compare(self) -> None:
        """Compare the histories at the last collective that all members of a set have come to."""
        board = self._judge.board
        for set_id, members in self._members.items():
            common = min(self.last(rank, set_id) for rank in members)
            if common <= self._compared.get(set_id, 0):
                continue
            entries = {rank: self.entry(rank, set_id, common) for rank in members}
            histories = {entry.history for entry in entries.values() if entry is not None}
            if len(histories) < 2:
                self._compared[set_id] = common
                continue
            kept = {
                rank: {entry.number: entry for entry in board.entries(rank) if entry.set_id == set_id}
                for rank in members
            }
            for number in sorted(set.intersection(*(set(numbers) for numbers in kept.values()))):
                if len({kept[rank][number].history for rank in members}) > 1:
                    self._mismatch({rank: self.call(rank, kept[rank][number]) for rank in members})
                    return

    def _find_deserted(self) -> None:
        """Ranks that wait for one that has ended well and will never come."""
        gone = self._judge.gone
        if not gone:
            return
        for rank, (set_id, number) in self.waiting().items():
            left = [
                member
                for member in self.members(set_id)
                if member in gone and self.last(member, set_id) < number
            ]
            if left:
                self._subset(set_id, number, [rank], left)
                return

    def _find_circle(self) -> None:
        """Ranks that wait for each other in different process sets."""
        waiting = self.waiting()
        places = set(waiting.values())
        if len(places) < 2:
            self._circle = None
            return
        absent = {place: self.missing(*place) for place in places}
        # What is left when all who wait for a running rank are taken away waits for itself.
        stuck = set(waiting)
        while True:
            free = {
                rank
                for rank in stuck
                if any(other not in stuck for other in absent[waiting[rank]]) or not absent[waiting[rank]]
            }
            if not free:
                break
            stuck -= free
        state = tuple(sorted((rank, waiting[rank]) for rank in stuck))
        if not stuck:
            self._circle = None
        elif state != self._circle:
            self._circle = state
            self._judge.urgent = True
        else:
            self._mismatch(
                {rank: self.call(rank, self.entry(rank, *waiting[rank])) for rank in sorted(stuck)}
            )

    def _mismatch(self, calls: Mapping[int, Call]) -> None:
        groups: list[tuple[Call, list[int]]] = []
        for rank, call in sorted(calls.items()):
            for known, ranks in groups:
                if known.signature == call.signature and known.where == call.where:
                    ranks.append(rank)
                    break
            else:
                groups.append((call, [rank]))
        conditional = [entry for entry in groups if entry[0].condition]
        extra = conditional if len(conditional) == 1 else self._extra(groups)
        if len(groups) > 1 and len(extra) == 1:
            call, ranks = extra[0]
            others = [entry for entry in groups if entry is not extra[0]]
            self._find_subset(call, ranks, " ".join(_does(other, at) for other, at in others))
            return
        from hora.guard.judge import ranks_text

        minority = min(groups, key=lambda entry: len(entry[1]))
        said = "; ".join(f"{ranks_text(ranks)} {_calls(ranks)} {call.site}" for call, ranks in groups)
        self._judge.find(
            Verdict(
                kind="mismatched-calls",
                text=f"At the same place {said}. {_difference([call for call, _ in groups])}",
                advice="Make the same call on every rank, in the same order, with equal arguments; what differs "
                "by rank must not decide which collective is called.",
                ranks=sorted(minority[1]) if len(minority[1]) < len(calls) / 2 else sorted(calls),
                call=minority[0].text,
                where=minority[0].where,
                step=self._judge.step(minority[1][0]),
            ),
            key=("calls",),
            stop=True,
        )

    def _extra(self, groups: Sequence[tuple[Call, list[int]]]) -> list[tuple[Call, list[int]]]:
        """The one group whose line the others never came to, while it knows all of theirs."""
        lines = [{call.where for rank in ranks for call in self._known[rank].values()} for _, ranks in groups]
        return [
            group
            for index, group in enumerate(groups)
            if all(
                group[0].where not in lines[other] and groups[other][0].where in lines[index]
                for other in range(len(groups))
                if other != index
            )
        ]

    def _subset(self, set_id: int, number: int, ranks: Sequence[int], left: Sequence[int]) -> None:
        from hora.guard.judge import ranks_text

        call = self.call(ranks[0], self.entry(ranks[0], set_id, number))
        callers = [rank for rank, place in self.waiting().items() if place == (set_id, number)]
        came = self.last(left[0], set_id)
        last = self.call(left[0], self.entry(left[0], set_id, came)) if came else None
        end = f" after {last.site}" if last is not None else " without calling any"
        self._find_subset(
            call,
            callers,
            f"{ranks_text(left).capitalize()} {_has(left)} ended, with exit code 0,{end}.",
        )

    def _find_subset(self, call: Call, ranks: Sequence[int], others: str) -> None:
        from hora.guard.judge import ranks_text

        why = f" The line stands under a condition on the rank: {call.condition}." if call.condition else ""
        self._judge.find(
            Verdict(
                kind="subset-call",
                text=f"Only {ranks_text(ranks)} {_calls(ranks)} {call.site}, and would wait there for ever. "
                f"{others}{why}",
                advice="A collective needs all ranks: take it out of the condition, let only the printing or "
                "saving depend on the rank; or give every rank the same number of steps.",
                ranks=sorted(ranks),
                call=call.text,
                where=call.where,
                step=self._judge.step(ranks[0]),
            ),
            key=("calls",),
            stop=True,
        )


def _calls(ranks: Sequence[int]) -> str:
    return "calls" if len(ranks) == 1 else "call"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _does(call: Call, ranks: Sequence[int]) -> str:
    from hora.guard.judge import ranks_text

    return f"{ranks_text(ranks).capitalize()} {_calls(ranks)} {call.site} instead."


def _difference(calls: Sequence[Call]) -> str:
    """Which part of the calls differs, in words."""
    for name in FIELDS:
        values = list(dict.fromkeys(str(call.signature.get(name)) for call in calls))
        if len(values) > 1:
            return f"The {name} differs: {' and '.join(values)}."
    return "They wait for each other."
