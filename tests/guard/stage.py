"""Ranks that exist only as their board and the records they would send; a supervisor that only listens."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hora.guard.board import Board, Phase
from hora.guard.judge import Judge, Options
from hora.guard.verdict import Earlier, Verdict

FIRST = {"collective": "allreduce", "dtype": "float32", "shape": [[3]], "operation": "sum", "root": None}


class Desk:
    """What the judge asks of its supervisor, kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.verdicts: list[tuple[Verdict, bool]] = []
        self.earlier: list[Earlier] = []
        self.asked: list[int] = []
        self.stopped: dict[int, dict[int, str]] = {}
        self.halted: set[int] = set()
        self.complaints: list[str] = []

    def send(self, rank: int, record: Mapping[str, Any]) -> None:
        self.sent.append((rank, dict(record)))

    def publish(self, verdict: Verdict, *, stop: bool, earlier: Earlier | None = None) -> None:
        self.earlier += [earlier] if earlier is not None else []
        self.verdicts.append((verdict, stop))

    def ask_stack(self, rank: int) -> None:
        self.asked.append(rank)

    def is_stopped(self, rank: int) -> bool:
        return rank in self.halted

    def stopped_children(self, rank: int) -> Mapping[int, str]:
        return self.stopped.get(rank, {})

    def complain(self, text: str) -> None:
        self.complaints.append(text)


class Stage:
    """A judge and the ranks that it judges.

    A rank's records wait in ``post[rank]`` until :meth:`deliver`, as they may be late on their socket.
    """

    def __init__(self, size: int, **options: Any) -> None:
        fd = Board.make(size)
        self.board = Board(fd, size)
        os.close(fd)
        self.size = size
        self.desk = Desk()
        hosts = [f"host{rank % 2}" for rank in range(size)]
        self.judge = Judge(self.board, self.desk, options=Options(**options), hosts=hosts)
        self.slots = [self.board.slot(rank) for rank in range(size)]
        self.post: list[deque[dict[str, Any]]] = [deque() for _ in range(size)]
        self.members: dict[int, Sequence[int]] = {0: range(size)}
        self._known: list[dict[str, int]] = [{} for _ in range(size)]
        self._numbers: list[dict[int, tuple[int, int]]] = [{} for _ in range(size)]

    def call(
        self,
        rank: int,
        name: str = "loss",
        *,
        where: str = "train.py:10",
        condition: str | None = None,
        blocks: Sequence[Any] = (),
        set_id: int = 0,
        since: float | None = None,
        **fields: Any,
    ) -> None:
        """A rank enters a collective and waits in it."""
        signature = FIRST | {"process set": f"{len(self.members[set_id])} ranks"} | fields
        key = repr((name, where, condition, sorted(signature.items(), key=repr)))
        new = key not in self._known[rank]
        number = self._known[rank].setdefault(key, len(self._known[rank]))
        if new:
            text = f"{signature['collective']} '{name}'"
            record = {"kind": "call", "id": number, "signature": signature, "text": text}
            self.post[rank].append(record | {"where": where, "condition": condition, "blocks": blocks})
        if set_id not in self._numbers[rank] and set_id:
            self.post[rank].append({"kind": "set", "set": set_id, "members": list(self.members[set_id])})
        count, history = self._numbers[rank].get(set_id, (0, 0))
        history = hash((history, repr(sorted(signature.items(), key=repr)))) % 2**63
        self._numbers[rank][set_id] = count + 1, history
        self.slots[rank].enter(set_id, count + 1, number, history)
        if new:
            self.post[rank].append({"kind": "check", "set": set_id, "number": count + 1})
        phase = Phase.CHECKING if new else Phase.WAITING
        self.slots[rank].phase(phase, set_id, count + 1, time.monotonic() if since is None else since)

    def run(self, rank: int) -> None:
        """A rank is out of its collective."""
        set_id, (number, _) = list(self._numbers[rank].items() or [(0, (0, 0))])[-1]
        self.slots[rank].phase(Phase.RUNNING, set_id, number, time.monotonic())

    def deliver(self, *ranks: int) -> None:
        """The supervisor hears all that these ranks (none named: all) have sent."""
        for rank in ranks or range(self.size):
            while self.post[rank]:
                self.judge.receive(rank, self.post[rank].popleft())

    def look(self, *, times: int = 3, now: float | None = None) -> None:
        """Deliver everything, and let the judge look."""
        self.deliver()
        for _ in range(times):
            self.judge.tick(now)

    @property
    def cleared(self) -> list[int]:
        """Ranks that were told to go on."""
        return [rank for rank, record in self.desk.sent if record["kind"] == "clear"]

    @property
    def verdict(self) -> Verdict:
        """The only verdict, which stops the job."""
        [(verdict, stop)] = self.desk.verdicts
        assert stop
        return verdict
