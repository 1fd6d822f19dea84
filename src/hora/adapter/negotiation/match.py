"""Matching by name: which operations have been asked for by all who must, and which never can be.

Pure bookkeeping without sockets or threads; the coordinator of rank 0 feeds it what the ranks ask and
sends on what it answers.

An operation is *ready* when each member of its process set has asked for it or has joined. Before that it
waits, whatever else completes meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Answer", "Ask", "Fail", "Joined", "Key", "Run", "SetChange", "Table"]

Key = tuple[int, str]
"""Id of the process set, and the operation's name in it (``allreduce.grad``)."""

JOINABLE = ("allreduce", "barrier")
"""Kinds in which a joined rank can take part without tensors of its own."""


ROWS_NEEDED = ("allgather", "alltoall", "reducescatter")
"""Kinds that share or join first dimensions."""


class Ask(NamedTuple):
    """What one rank says about an operation; made of what JSON can carry."""

    kind: str
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    device: str = "cpu"
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of each
    splits: tuple[int, ...] | None = None
    grouped: bool = False
    ranks: tuple[int, ...] = ()  # of a process set that is to be added

    @classmethod
    def from_wire(cls, fields: list[object]) -> Ask:
        return cls(*(_frozen(value) for value in fields))  # type: ignore[arg-type]

    def bytes_estimate(self) -> int:
        """At most 8 bytes per element: enough to decide what is small."""
        return sum(8 * math.prod(shape) for _, shape in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All members run the operation now.

    Attributes:
        members: ranks that take part.
        ask: what was asked; for joined ranks, who have no tensors of their own.
        rows: first dimensions on all members (see ``Request.rows``).
        absent: members that joined, and contribute zeros.
        asked: when the first rank asked, ``time.monotonic()``.
    """

    key: Key
    members: tuple[int, ...]
    ask: Ask
    rows: list[list[int]] | None
    absent: frozenset[int]
    asked: float


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The operation cannot be run; ``ranks`` are those who asked for it.

    Attributes:
        echo: whether the cause is that another rank has ended.
    """

    key: Key
    ranks: tuple[int, ...]
    text: str
    echo: bool = False


@dataclass(frozen=True, kw_only=True)
class Joined:
    """All ranks have joined."""

    last: int


@dataclass(frozen=True, kw_only=True)
class SetChange:
    """All ranks asked to add (``ranks`` given) or remove a process set."""

    key: Key
    ranks: tuple[int, ...]


Answer = Run | Fail | Joined | SetChange


@dataclass
class _Entry:
    asked: float
    asks: dict[int, Ask] = field(default_factory=dict)
    warned: bool = False


class Table:
    """The operations that wait, for a job of ``size`` ranks.

    Args:
        sets: members of the process sets that are in use already, by their ids.
        next_set: the id that the next one gets.
    """

    def __init__(
        self,
        size: int,
        *,
        sets: Mapping[int, Sequence[int]] | None = None,
        next_set: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self._clock = clock
        self._sets = {0: tuple(range(size))} | {key: tuple(found) for key, found in (sets or {}).items()}
        self._next_set = next_set
        self._waiting: dict[Key, _Entry] = {}
        self._joined: list[int] = []
        self._left: dict[int, str] = {}

    def ask(self, rank: int, key: Key, ask: Ask) -> list[Answer]:
        """``rank`` asks for an operation."""
        entry = self._waiting.get(key)
        if entry is None:
            if key[0] not in self._sets:
                return [Fail(key=key, ranks=(rank,), text=f"Process set {key[0]} was removed.")]
            entry = self._waiting[key] = _Entry(self._clock())
        entry.asks[rank] = ask
        return self._settle(key)

    def join(self, rank: int) -> list[Answer]:
        """``rank`` has no more data."""
        if rank not in self._joined:
            self._joined.append(rank)
        answers = self._settle_all()
        if self._left:
            text = next(iter(self._left.values()))
            self._joined.remove(rank)
            return [*answers, Fail(key=(0, "join"), ranks=(rank,), text=text, echo=True)]
        if len(self._joined) == self.size:
            answers.append(Joined(last=self._joined[-1]))
            self._joined.clear()
        return answers

    def leave(self, rank: int, text: str) -> list[Answer]:
        """``rank`` takes part in nothing more; ``text`` says why to those who wait for it."""
        self._left[rank] = text
        answers = self._settle_all()
        if self._joined:
            answers.append(Fail(key=(0, "join"), ranks=tuple(self._joined), text=text, echo=True))
            self._joined.clear()
        return answers

    def next_deadline(self, seconds: float) -> float | None:
        """When the next waiting operation has waited for so long, and was not reported before."""
        return min((entry.asked + seconds for entry in self._fresh()), default=None)

    def overdue(self, seconds: float) -> list[tuple[str, list[int]]]:
        """Operations that have waited for so long, with the ranks they wait for; each is told once."""
        now = self._clock()
        found = []
        for key, entry in self._waiting.items():
            if not entry.warned and now >= entry.asked + seconds:
                entry.warned = True
                found.append((key[1], self._missing(key, entry)))
        return found

    def oldest(self) -> float | None:
        """When the operation that has waited longest was asked for."""
        return min((entry.asked for entry in self._waiting.values()), default=None)

    def abandon(self, seconds: float, text: str) -> list[Answer]:
        """Give up on what has waited for so long."""
        limit = self._clock() - seconds
        late = [(key, entry) for key, entry in self._waiting.items() if entry.asked <= limit]
        for key, _ in late:
            del self._waiting[key]
        return [Fail(key=key, ranks=tuple(entry.asks), text=text) for key, entry in late]

    def _fresh(self) -> Iterable[_Entry]:
        return (entry for entry in self._waiting.values() if not entry.warned)

    def _members(self, key: Key) -> tuple[int, ...]:
        return self._sets[key[0]]

    def _missing(self, key: Key, entry: _Entry) -> list[int]:
        return [rank for rank in self._members(key) if rank not in entry.asks and rank not in self._joined]

    def _settle_all(self) -> list[Answer]:
        return [answer for key in list(self._waiting) for answer in self._settle(key)]

    def _settle(self, key: Key) -> list[Answer]:
        entry = self._waiting[key]
        members = self._members(key)
        asked = tuple(sorted(entry.asks))
        gone = [rank for rank in members if rank in self._left]
        if gone:
            del self._waiting[key]
            return [Fail(key=key, ranks=asked, text=self._left[gone[0]], echo=True)]
        if self._missing(key, entry):
            kinds = {ask.kind for ask in entry.asks.values()}
            stopped = [rank for rank in members if rank in self._joined and rank not in entry.asks]
            if stopped and not kinds & {*JOINABLE, "add", "remove"}:
                # It can never be run, so those who asked hear at once; those to come hear then.
                del self._waiting[key]
                return [Fail(key=key, ranks=asked, text=_joined_text(key, kinds.pop(), stopped))]
            return []
        del self._waiting[key]
        text = _mismatch(entry.asks) or self._beyond_joined(key, entry)
        if text is not None:
            return [Fail(key=key, ranks=asked, text=f"{text} (operation {key[1]})")]
        first = entry.asks[asked[0]]
        if first.kind in ("add", "remove"):
            return [self._change(key, first, asked)]
        return [
            Run(
                key=key,
                members=members,
                ask=first,
                rows=_rows([entry.asks[rank] for rank in members]) if len(asked) == len(members) else None,
                absent=frozenset(members) - frozenset(asked),
                asked=entry.asked,
            )
        ]

    def _beyond_joined(self, key: Key, entry: _Entry) -> str | None:
        stopped = [rank for rank in self._members(key) if rank not in entry.asks]
        kind = next(iter(entry.asks.values())).kind
        return _joined_text(key, kind, stopped) if stopped and kind not in JOINABLE else None

    def _change(self, key: Key, ask: Ask, asked: tuple[int, ...]) -> Answer:
        if ask.kind == "remove":
            if any(other[0] == ask.root for other in self._waiting):
                text = f"Process set {ask.root} cannot be removed: operations on it are waiting."
                return Fail(key=key, ranks=asked, text=text)
            self._sets.pop(ask.root, None)
            return SetChange(key=key, ranks=())
        set_id, self._next_set = self._next_set, self._next_set + 1
        self._sets[set_id] = ask.ranks
        return SetChange(key=key, ranks=ask.ranks)


def _joined_text(key: Key, kind: str, stopped: list[int]) -> str:
    who = f"Rank {stopped[0]}" if len(stopped) == 1 else f"Ranks {', '.join(map(str, stopped))}"
    return (
        f"{kind.capitalize()} is not supported with join: {who} joined before {key[1]}. "
        "Only allreduce and barrier go on after a join."
    )


def _rows(asks: list[Ask]) -> list[list[int]] | None:
    """First dimensions, by tensor and member for allgather, by member for alltoall."""
    if asks[0].kind == "allgather":
        return [[ask.tensors[index][1][0] for ask in asks] for index in range(len(asks[0].tensors))]
    if asks[0].kind == "alltoall":
        return [list(ask.splits or ()) for ask in asks]
    return None


def _mismatch(asks: dict[int, Ask]) -> str | None:
    """What two ranks disagree about, if they do, or what none of them may ask for."""
    ranks = sorted(asks)
    for rank in ranks:
        kind = asks[rank].kind
        if kind in ROWS_NEEDED and any(not shape for _, shape in asks[rank].tensors):
            return f"Rank {rank} tried to {kind} a tensor without dimensions; reshape it with tensor.view(1)."
    first, first_rank = asks[ranks[0]], ranks[0]
    for rank in ranks[1:]:
        text = _difference(first, first_rank, asks[rank], rank)
        if text is not None:
            return text
    return None


def _difference(one: Ask, a: int, other: Ask, b: int) -> str | None:
    kind = one.kind
    for what, left, right, differs in (
        ("Mismatched collective operations", f"did an {kind}", f"did an {other.kind}", kind != other.kind),
        (
            "Mismatched device selection",
            f"has its tensor on {one.device}",
            f"on {other.device}",
            one.device != other.device,
        ),
        (
            f"Mismatched number of tensors in a group of {kind}",
            f"gave {len(one.tensors)}",
            f"{len(other.tensors)}",
            len(one.tensors) != len(other.tensors) or one.grouped != other.grouped,
        ),
        (f"Mismatched {kind} reduce operations", f"asked for {one.op}", other.op, one.op != other.op),
        (
            f"Mismatched {kind} prescale or postscale factors",
            f"gave {one.prescale} and {one.postscale}",
            f"{other.prescale} and {other.postscale}",
            (one.prescale, one.postscale) != (other.prescale, other.postscale),
        ),
        (
            f"Mismatched {kind} root ranks",
            f"named root rank {one.root}",
            f"root rank {other.root}",
            one.root != other.root,
        ),
        ("Mismatched process set ranks", f"gave {one.ranks}", f"{other.ranks}", one.ranks != other.ranks),
    ):
        if differs:
            return f"{what}: rank {a} {left}, but rank {b} {right}."
    for (dtype, shape), (other_dtype, other_shape) in zip(one.tensors, other.tensors, strict=True):
        if dtype != other_dtype:
            return f"Mismatched data types: rank {a} had type {dtype}, but rank {b} had type {other_dtype}."
        free = 1 if kind in ("allgather", "alltoall") else 0  # whose first dimension may differ
        if len(shape) != len(other_shape) or shape[free:] != other_shape[free:]:
            but = ", which may differ in the first dimension only" if free else ""
            return (
                f"Mismatched {kind} tensor shapes: rank {a} sent a tensor of shape {list(shape)}, "
                f"but rank {b} sent one of shape {list(other_shape)}{but}."
            )
    return None


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
