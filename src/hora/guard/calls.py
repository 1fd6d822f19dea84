"""Do all ranks call the same collectives? The verdicts ``mismatched-calls`` and ``subset-call``.

A rank that makes a call of a new kind asks before it starts, and goes on when every member of the process
set was seen to make an equal call at the same place of the set's sequence. Calls of a known kind are
only written on the board, with a running hash of all before them, which is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hora.guard.board import Entry, Phase
from hora.guard.call import UNKNOWN, Call, block_left, difference, passed_over
from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Calls"]

SHOWN = 4
"""Different calls that a verdict shows; others are counted."""

PATIENCE = 0.4
"""Seconds after a first difference for ranks that are still to come: they tell who is odd."""

LEFT = 3
"""Looks after which a rank has left the job for good. If an exception is why, it is heard by the second."""


class Calls:
    """Compares the ranks' sequences of collectives."""

    kinds = frozenset({"call", "check", "set", "parted"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._places = judge.places
        self._known: list[dict[int, Call]] = [{} for _ in range(judge.size)]
        self._checks: dict[tuple[int, int], set[int]] = {}  # ranks that wait for a place to be cleared
        self._doubts: dict[tuple[int, int], float] = {}  # since when a place is known to differ
        self._left: dict[int, int] = {}  # looks for which a rank has been out of the job
        self._now = 0.0
        self._compared: dict[int, int] = {}
        self._circle: tuple[Any, ...] | None = None

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        if record["kind"] == "call":
            self._known[rank][int(record["id"])] = Call(
                dict(record["signature"]),
                str(record["text"]),
                record.get("where"),
                record.get("condition"),
                [(int(first), int(last), str(text)) for first, last, text in record.get("blocks", ())],
            )
        elif record["kind"] == "set":
            members = [int(member) for member in record["members"]]
            if not members or not all(0 <= member < self._judge.size for member in members):
                raise ValueError(f"there are no such ranks: {members}")
            self._places.declare(int(record["set"]), members)
        elif record["kind"] == "parted":
            self._part(record)
        else:
            place = int(record["set"]), int(record["number"])
            self._checks.setdefault(place, set()).add(rank)

    def _part(self, record: Mapping[str, Any]) -> None:
        """The gradients of different steps have met: some rank has left out a step or a backward pass."""
        self._judge.find(
            Verdict(
                kind="mismatched-calls",
                text=str(record["text"]),
                advice=str(record["advice"]),
                ranks=list(range(self._judge.size)),
                call="average gradients",
                where=record["where"],
            ),
            key=("calls",),
            stop=True,
        )

    def ended(self, rank: int) -> None:
        return

    def tick(self, now: float) -> None:
        self._now = now
        for place in list(self._checks):
            self._settle(place)
        self._compare()
        self._find_deserted()
        self._find_circle()

    def call(self, rank: int, entry: Entry | None) -> Call:
        """The call that an entry of the board stands for."""
        return UNKNOWN if entry is None else self._known[rank].get(entry.call, UNKNOWN)

    def reduction(self, rank: int) -> Call | None:
        """The first call by which a rank's script reduces more than a number; Hora's own do not count."""
        return next((call for call in self._known[rank].values() if call.reduces), None)

    def waiting(self) -> dict[int, tuple[int, int]]:
        """Ranks inside a collective: its process set and number."""
        return self._places.waiting(without=self._judge.gone | self._judge.dead)

    def _settle(self, place: tuple[int, int]) -> None:
        """Clear a place for those that asked when all members have come to it with equal calls."""
        set_id, number = place
        calls: dict[int, Call] = {}
        absent = 0
        for rank in self._places.members(set_id):
            entry = self._places.entry(rank, set_id, number)
            call = self.call(rank, entry)
            if call is not UNKNOWN:
                calls[rank] = call
            elif self._places.heads[rank].phase != Phase.JOINED:  # else the adapter says what it answers
                ahead = self._places.last(rank, set_id) - number
                # A call may be on the board while its description is still on the way.
                absent += ahead < 0 or (ahead == 0 and rank not in self._judge.unheard)
        if len({call.key for call in calls.values()}) > 1:
            if not absent or self._doubted_enough(place):
                self._mismatch(calls)
        elif absent:
            self._judge.urgent = True
        else:
            for rank in self._checks.pop(place):
                self._judge.desk.send(rank, {"kind": "clear", "set": set_id, "number": number})

    def _doubted_enough(self, place: tuple[int, int]) -> bool:
        """Whether ranks that have not come to a place are waited for no longer."""
        if self._judge.hurry or self._now - self._doubts.setdefault(place, self._now) >= PATIENCE:
            return True
        self._judge.urgent = True
        return False

    def _compare(self) -> None:
        """Compare the histories at the last collective that all members of a set have come to."""
        for set_id, members in self._places.sets.items():
            common = min(self._places.last(rank, set_id) for rank in members)
            if common <= self._compared.get(set_id, 0):
                continue
            entries = (self._places.entry(rank, set_id, common) for rank in members)
            if len({entry.history for entry in entries if entry is not None}) < 2:
                self._compared[set_id] = common
                continue
            calls = self._first_difference(set_id, members)
            if any(call is UNKNOWN and rank not in self._judge.unheard for rank, call in calls.items()):
                self._judge.urgent = True  # the description is on the way
            elif calls:
                self._mismatch(calls)

    def _first_difference(self, set_id: int, members: Sequence[int]) -> dict[int, Call]:
        """The calls at the first place of a set at which the histories differ; empty if the board lost it."""
        kept = {
            rank: {entry.number: entry for entry in self._judge.board.newest(rank) if entry.set_id == set_id}
            for rank in members
        }
        for number in sorted(set.intersection(*(set(numbers) for numbers in kept.values()))):
            if len({kept[rank][number].history for rank in members}) > 1:
                return {rank: self.call(rank, kept[rank][number]) for rank in members}
        return {}

    def _find_deserted(self) -> None:
        """Ranks that wait for one that has ended well and will never come."""
        # The heads were read before the last calls, so a rank is not taken for gone before its last call.
        heads = self._places.heads
        away = [rank for rank, head in enumerate(heads) if head.phase == Phase.ABSENT and head.calls]
        self._left = {rank: self._left.get(rank, 0) + 1 for rank in away}
        gone = self._judge.gone | {rank for rank, looks in self._left.items() if looks >= LEFT}
        self._judge.urgent |= not gone.issuperset(away)
        if not gone:
            return
        for place, waiting in {place: rank for rank, place in self.waiting().items()}.items():
            missing = self._places.missing(*place)
            meeting = self.call(waiting, self._places.entry(waiting, *place)).signature.get("collective")
            # Who has shut down may still come to the next init().
            ended = self._judge.gone if meeting == "init" else gone
            left = [rank for rank in missing if rank in ended]
            if left and (len(left) == len(missing) or self._doubted_enough(place)):
                self._subset(*place, left)
                return

    def _find_circle(self) -> None:
        """Ranks that wait for each other in different process sets."""
        waiting = self.waiting()
        places = set(waiting.values())
        if len(places) < 2:
            self._circle = None
            return
        absent = {place: self._places.missing(*place) for place in places}
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
                {rank: self.call(rank, self._places.entry(rank, *waiting[rank])) for rank in sorted(stuck)}
            )

    def _mismatch(self, calls: Mapping[int, Call]) -> None:
        found: dict[tuple[str, str | None], tuple[Call, list[int]]] = {}
        for rank, call in sorted(calls.items()):
            found.setdefault((call.key, call.where), (call, []))[1].append(rank)
        groups = list(found.values())
        conditional = [entry for entry in groups if entry[0].condition]
        passed = passed_over(groups)
        extra = next((each for each in (conditional, passed) if len(each) == 1), None) or self._extra(groups)
        if len(groups) > 1 and len(extra) == 1:
            call, ranks = extra[0]
            others = [entry for entry in groups if entry is not extra[0]]
            told = " ".join(_does(other, at) for other, at in others)
            if not call.condition and extra is passed:
                block = block_left(call, others[0][0])
                told += f" The line stands in {block}, which was left, or left out, there."
            elif not call.condition:
                told += " Either the one has made fewer steps than the other, or only it comes to that line."
            self._find_subset(call, ranks, told)
            return
        from hora.guard.judge import ranks_text

        minority = min(groups, key=lambda entry: len(entry[1]))
        said = "; ".join(f"{ranks_text(ranks)} {_calls(ranks)} {call.site}" for call, ranks in groups[:SHOWN])
        if len(groups) > SHOWN:
            said += f"; and {len(groups) - SHOWN} more calls differ"
        self._judge.find(
            Verdict(
                kind="mismatched-calls",
                text=f"At the same place {said}. {difference([call for call, _ in groups])}",
                advice="Make the same call on every rank, in the same order, with equal arguments; what "
                "differs by rank must not decide which collective is called.",
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
        if len(groups) > SHOWN:
            return []
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

    def _subset(self, set_id: int, number: int, left: Sequence[int]) -> None:
        from hora.guard.judge import ranks_text

        callers = [rank for rank, place in self.waiting().items() if place == (set_id, number)]
        call = self.call(callers[0], self._places.entry(callers[0], set_id, number))
        came = self._places.last(left[0], set_id)
        last = self.call(left[0], self._places.entry(left[0], set_id, came)) if came else None
        end = f" after {last.site}" if last is not None else " without calling any"
        how = "ended, with exit code 0," if set(left) <= self._judge.gone else "left the job"
        self._find_subset(
            call,
            callers,
            f"{ranks_text(left).capitalize()} {_has(left)} {how}{end}.",
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
