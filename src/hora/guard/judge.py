"""The judge: takes what the ranks report and what their board shows, and finds verdicts.

It runs inside the supervisor, calls nothing that can block, and its work per rank does not depend on how
many ranks there are. Each kind of finding is a :class:`Part` of its own.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from hora.guard.board import Board
from hora.guard.lines import written_for
from hora.guard.places import Places
from hora.guard.verdict import Earlier, Verdict

__all__ = ["Desk", "Judge", "Options", "Part"]


LONGEST_TRACEBACK = 6000
"""Characters of a failed rank's traceback that the others are told."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the guard judges.

    Attributes:
        mode: ``on`` checks each distinct call the first time it occurs, ``strict`` every call.
        stall_after: seconds of waiting after which a late rank is named.
        stall_abort: seconds of waiting after which the job is stopped; None: as ``timeout`` says.
        timeout: the setting ``HORA_TIMEOUT``: seconds after which a collective is given up in any case,
            unless the missing ranks are inside ``hora.only(...)``.
        replaces: whether late ranks are replaced then, and the job goes on.
    """

    mode: Literal["on", "strict"] = "on"
    stall_after: float = 30.0
    stall_abort: float | None = None
    timeout: float = 300.0
    replaces: bool = False


class Desk(Protocol):
    """What the judge needs from the supervisor. No method may block."""

    def send(self, rank: int, record: Mapping[str, Any]) -> None:
        """Send a record to one rank; to one that has ended it is lost."""
        ...

    def publish(self, verdict: Verdict, *, stop: bool, earlier: Earlier | None = None) -> None:
        """Show and write down a verdict. With ``stop`` every rank is told, raises it, and the job ends.

        With ``earlier`` only its line is shown.
        """
        ...

    def ask_stack(self, rank: int) -> None:
        """Have a rank's stack taken; it comes back by :meth:`Judge.stack`."""
        ...

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped the rank (SIGSTOP); False where that cannot be seen at once."""
        ...

    def stopped_children(self, rank: int) -> Mapping[int, str]:
        """The processes that a rank has started and that are stopped: their pids, and what they are."""
        ...

    def complain(self, text: str) -> None:
        """Say that the guard itself has a problem."""
        ...


class Part(Protocol):
    """One kind of finding.

    Attributes:
        kinds: the records it takes, by their ``kind``.
    """

    kinds: frozenset[str]

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        """A record of a rank."""
        ...

    def tick(self, now: float) -> None:
        """Look at the board; ``now`` is ``time.monotonic()``."""
        ...

    def ended(self, rank: int) -> None:
        """A rank's process has ended, well or not."""
        ...


class Judge:
    """All parts together, and what they share.

    Args:
        board: what the ranks show.
        desk: the supervisor.
        options: see :class:`Options`.
        hosts: host of each rank.

    Attributes:
        gone: ranks whose process has ended with exit code 0.
        dead: ranks whose process has ended otherwise.
        unheard: ranks whose socket is closed: they only write on the board.
        module: the adapter that the ranks use, in whose vocabulary lines are written.
        places: where each rank is, as of the last look at the board.
        hurry: whether a finding must come now, though ranks that are still to come would make it clearer.
        urgent: whether the next :meth:`tick` is wanted soon (:data:`SOON`), rather than at leisure.
    """

    SOON = 0.02
    LEISURE = 0.5

    def __init__(self, board: Board, desk: Desk, *, options: Options, hosts: Sequence[str]) -> None:
        from hora.guard.calls import Calls
        from hora.guard.data import Data
        from hora.guard.gradients import Gradients
        from hora.guard.late import Late
        from hora.guard.pace import Pace
        from hora.guard.plan import Plan
        from hora.guard.replicas import Replicas
        from hora.guard.saves import Saves

        self.board = board
        self.desk = desk
        self.options = options
        self.hosts = list(hosts)
        self.size = board.size
        self.gone: set[int] = set()
        self.dead: set[int] = set()
        self.unheard: set[int] = set()
        self.places = Places(board)
        self.module = "hora.torch"
        self.stopped = False
        self.urgent = False
        self.hurry = False
        self._urgent_since: float | None = None
        self.calls = Calls(self)
        self.late = Late(self)
        self._said: set[Hashable] = set()
        self.replicas = Replicas(self)
        self._parts: list[Part] = [self.calls, self.late, self.replicas]
        self._parts += [part(self) for part in (Plan, Gradients, Data, Pace, Saves)]
        self._takers: dict[str, Part] = {kind: part for part in self._parts for kind in part.kinds}

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        """A record that a rank sent. One of an unknown kind, or broken, is ignored: ranks are not trusted."""
        self._urgent_since = None
        if record.get("kind") == "module":
            self.module = str(record.get("name"))
            return
        part = self._takers.get(str(record.get("kind")))
        if part is None or self.stopped:
            return
        try:
            part.receive(rank, record)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self.desk.complain(
                f"the guard cannot read a record of rank {rank} ({error!r}): {str(record)[:200]}"
            )

    def stack(self, rank: int, text: str) -> None:
        """The stack of a rank, as ``faulthandler`` wrote it."""
        self.late.stack(rank, text)

    def failed(self, rank: int, *, error: str, message: str, traceback: str, where: str | None) -> None:
        """A rank raised: tell the others, so that they need not find out by a lost connection."""
        self.hurry = True
        self.tick()  # the calls before the failure may explain it
        self.hurry = False
        if self.stopped:
            return
        first = message.strip().splitlines()[0] if message.strip() else ""
        what = f"{error}: {first}" if first else error
        at = f" at {where}" if where else ""
        trace = f"\n{_shortened(traceback.rstrip())}" if traceback.strip() else ""
        self.find(
            Verdict(
                kind="rank-failed",
                text=f"Rank {rank} failed{at}: {what}{trace}",
                advice="The other ranks were stopped; correct the error on that rank.",
                ranks=[rank],
                where=where,
                step=self.step(rank),
            ),
            key=("rank-failed",),
            stop=True,
        )

    def ended(self, rank: int, *, well: bool) -> None:
        """A rank's process has ended, ``well`` with exit code 0."""
        (self.gone if well else self.dead).add(rank)
        for part in self._parts:
            part.ended(rank)

    def tick(self, now: float | None = None) -> float:
        """Look at the board; returns the seconds after which to do so again."""
        now = time.monotonic() if now is None else now
        self.urgent = False
        self.places.look()
        for part in self._parts:
            if not self.stopped:
                part.tick(now)
        if not self.urgent:
            self._urgent_since = None
            return self.LEISURE
        if self._urgent_since is None:
            self._urgent_since = now
        # What has taken long may be noticed a little later.
        return min(self.LEISURE, max(self.SOON, 0.1 * (now - self._urgent_since)))

    def unheard_of(self, rank: int) -> None:
        """A rank's socket is closed: it neither sends nor hears records any more."""
        self.unheard.add(rank)

    def find(
        self, verdict: Verdict, *, key: Hashable, stop: bool = False, earlier: Earlier | None = None
    ) -> Verdict | None:
        """Publish a verdict, unless one with the same key was; after one that stops the job, nothing more.

        Args:
            verdict: it, without the hosts.
            key: equal for verdicts about the same.
            stop: whether it ends the job.
            earlier: what has been said about the same.

        Returns:
            The verdict as it was published; None if it was not.
        """
        if self.stopped or key in self._said:
            return None
        self._said.add(key)
        self.stopped = stop
        hosts = (
            list(dict.fromkeys(self.hosts[rank] for rank in verdict.ranks))
            if not verdict.hosts
            else verdict.hosts
        )
        published = replace(verdict, hosts=hosts, advice=written_for(self.module, verdict.advice))
        self.desk.publish(published, stop=stop, earlier=earlier)
        return published

    def step(self, rank: int) -> int | None:
        """Steps that a rank has made; None before its first."""
        return self.board.head(rank).step or None


def _shortened(text: str) -> str:
    """Both ends of a long traceback; the rank's log has all of it."""
    half = LONGEST_TRACEBACK // 2
    return text if len(text) <= LONGEST_TRACEBACK else f"{text[:half]}\n...\n{text[-half:]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0 and 3``, ``ranks 0 to 7``."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    if len(ordered) > 6:
        return f"ranks {', '.join(map(str, ordered[:5]))} and {len(ordered) - 5} more"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
