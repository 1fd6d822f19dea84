"""The supervisor's half of the guard: what the judge of :mod:`hora.guard` hears, sees and says.

For each rank a socket for records and a pipe for its stack; for all of them the board. The judge finds;
this carries. Whatever a rank sends, and whatever fault the guard itself may have, the job goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.core import settings
from hora.core.errors import RunDirectoryError
from hora.core.rundir import RunDirectory
from hora.guard.board import Board
from hora.guard.judge import Judge, Options
from hora.guard.verdict import Earlier, Verdict
from hora.guard.waits import waits
from hora.launch._away import AwayLink, Seat
from hora.launch._children import stopped
from hora.launch._link import Link
from hora.launch._loop import Loop
from hora.launch._stacks import Stacks
from hora.launch.failure import Outcome, what_happened
from hora.launch.job import Job, rank_environment

__all__ = ["Ends", "Guard"]

ECHO_PATIENCE = 0.8
"""Seconds in which the failure may still be heard of that made another rank lose its connection."""

SHARE = 4
"""The judge rests at least so many times as long as it has worked, however many records come.

Work is processor time: a judge that a busy host has kept from working need not rest for that, too.
"""

MOST_COMPLAINTS = 5


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What one rank gets from the guard.

    Attributes:
        environment: variables.
        inherited: descriptors.
        stack: the one of them on which the rank writes its stack; -1: none.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    inherited: Sequence[int] = ()
    stack: int = -1


class Guard:
    """Watches one job; does nothing with the setting ``off``.

    Args:
        say: shows a text on the console.
        alarmed: called with a verdict that stops the job, when the ranks have been told.
        announce: whether a verdict that stops the job is shown; it is in the job's result in any case.
        averted: asked about a verdict that would stop the job; True when that is taken care of otherwise.
        hosts: host of each rank; None: all are on this one.

    Attributes:
        verdict: the one that stopped the job.
    """

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        loop: Loop,
        *,
        say: Callable[[str], None],
        alarmed: Callable[[Verdict], None],
        announce: bool,
        averted: Callable[[Verdict], bool] = lambda _: False,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self._averted = averted
        self.verdict: Verdict | None = None
        self._job, self._run, self._loop = job, run, loop
        self._say, self._alarmed, self._announce = say, alarmed, announce
        self._links: dict[int, Link | AwayLink] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._seats: dict[int, Seat] = {}
        self._complaints = 0
        self._late_told = False
        self._echo: Callable[[], None] | None = None
        self._earliest = 0.0
        self._judge: Judge | None = None
        self._board: Board | None = None
        self._board_fd = -1
        self._own_ends: tuple[socket.socket, int] | None = None
        self._rank_ends: tuple[socket.socket, int] | None = None
        self._ticks = loop.timer(self._tick)
        self._echoes = loop.timer(self._believe_echo)
        self._stacks = Stacks(loop, self._stack)
        chosen = settings.load(rank_environment(job))
        if chosen.guard != "off":
            options = Options(
                mode=chosen.guard,
                stall_after=chosen.stall_after,
                stall_abort=chosen.stall_abort,
                timeout=chosen.timeout,
                replaces=job.elastic is not None,
            )
            self._board_fd = Board.make(job.workers)
            self._board = Board(self._board_fd, job.workers)
            here = [socket.gethostname()] * job.workers
            self._judge = Judge(self._board, self, options=options, hosts=hosts or here)

    # --- what the supervisor does ---------------------------------------------------------------

    def ends(self) -> Ends:
        """For the rank that is started next; :meth:`started` follows."""
        if self._judge is None:
            return Ends()
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self._own_ends, self._rank_ends = (ours, reader), (theirs, writer)
        return Ends(
            environment={"HORA_GUARD_FD": str(theirs.fileno()), "HORA_GUARD_BOARD": str(self._board_fd)},
            inherited=(theirs.fileno(), writer, self._board_fd),
            stack=writer,
        )

    def started(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """A rank runs with the ends made for it."""
        if self._own_ends is None or self._rank_ends is None:
            return
        (ours, reader), (theirs, writer) = self._own_ends, self._rank_ends
        self._own_ends = self._rank_ends = None
        theirs.close()
        os.close(writer)
        self._follow(rank, process, ours, reader=reader, writer=writer)

    def admit(
        self, rank: int, process: subprocess.Popen[bytes], *, reader: int, writer: int
    ) -> tuple[socket.socket, int] | None:
        """A process that runs already is this rank from now on.

        Args:
            rank: which one.
            process: it.
            reader: a descriptor of the pipe on which it writes its stack; the guard closes it.
            writer: the number that the other end has there.

        Returns:
            Its end of the socket, which the caller sends and closes, and the board's descriptor; None without
            a guard.
        """
        if self._judge is None:
            os.close(reader)
            return None
        ours, theirs = socket.socketpair()
        self._follow(rank, process, ours, reader=reader, writer=writer)
        return theirs, self._board_fd

    def admit_away(self, rank: int, seat: Seat) -> None:
        """A process on another host is this rank from now on; only where the guard :attr:`watches`."""
        assert self._board is not None
        self._seats[rank] = seat
        self._links[rank] = seat.open(
            rank,
            self._board,
            receive=lambda record: self._receive(rank, record),
            closed=lambda: self._unheard(rank),
            stack=lambda text: self._stack(rank, text),
        )

    @property
    def watches(self) -> bool:
        """Whether there is a guard."""
        return self._judge is not None

    def _follow(
        self, rank: int, process: subprocess.Popen[bytes], ours: socket.socket, *, reader: int, writer: int
    ) -> None:
        self._processes[rank] = process
        self._stacks.add(rank, process, reader, writer=writer)
        self._links[rank] = Link(
            ours,
            self._loop,
            receive=lambda record: self._receive(rank, record),
            complain=lambda what: self.complain(f"rank {rank} {what}"),
            closed=lambda: self._unheard(rank),
        )

    def all_started(self) -> None:
        """No more ranks will be started."""
        if self._board_fd >= 0:
            os.close(self._board_fd)
            self._board_fd = -1
        if self._judge is not None:
            self._ticks.at = time.monotonic() + self._judge.LEISURE

    def raised(self, rank: int, record: Mapping[str, Any]) -> None:
        """A rank says that it has raised; it has not ended yet."""
        if rank in self._links:
            self._failed(rank, Outcome(rank=rank, code=0, ended=time.time(), record=dict(record)))

    def ended(self, outcome: Outcome) -> None:
        """A rank has ended."""
        if outcome.rank in self._links:
            self._links[outcome.rank].drain()
            self._links[outcome.rank].close()
            if outcome.rank not in self._seats:
                self._stacks.remove(outcome.rank)
        if self._judge is None:
            return
        with self._unharmed():
            self._judge.ended(outcome.rank, well=outcome.well)
        self._soon()
        if outcome.failed:
            self._failed(outcome.rank, outcome)

    def settle(self) -> None:
        """All ranks have ended: what was waited with is decided now."""
        if self._judge is not None:
            self._tick()
            self._believe_echo()

    def waits(self) -> str:
        """Who waits for whom now, in a sentence, unless a verdict has told it; empty when nobody does."""
        found = ""
        with self._unharmed():
            if self._judge is not None and not self._late_told:
                found = waits(self._judge, time.monotonic())
        return found

    def silence(self) -> None:
        """The job is being stopped for another reason: what the ranks do from now on tells nothing."""
        self._judge = None
        self._ticks.at = self._echoes.at = None

    def close(self) -> None:
        """Give up all descriptors."""
        self.silence()
        for link in self._links.values():
            link.close()
        for seat in self._seats.values():
            seat.close()
        self._stacks.close()
        for ends in (self._own_ends, self._rank_ends):
            if ends is not None:
                ends[0].close()
                os.close(ends[1])
        self._own_ends = self._rank_ends = None
        if self._board_fd >= 0:
            os.close(self._board_fd)
            self._board_fd = -1
        if self._board is not None:
            self._board.close()
            self._board = None
        self._loop.drop(self._ticks, self._echoes)

    # --- what the judge asks for (hora.guard.judge.Desk) ----------------------------------------

    def send(self, rank: int, record: Mapping[str, Any]) -> None:
        """Send a record to one rank."""
        self._links[rank].send(record)

    def publish(self, verdict: Verdict, *, stop: bool, earlier: Earlier | None = None) -> None:
        """Show and write down a verdict; with ``stop``, tell the ranks and end the job."""
        try:
            if earlier is None:
                self._run.append_verdict(verdict.line())
            else:
                self._run.replace_verdict(earlier.verdict.line(), verdict.line())
        except RunDirectoryError as error:
            self.complain(f"a verdict is not written down: {error}")
        if verdict.kind == "plan":
            if not self._job.quiet:
                self._say(f"hora: {verdict.text}")
        elif earlier is not None:
            self._say(f"hora: {earlier.line}")
        elif verdict.kind != "rank-failed" and (self._announce or not stop):
            # The report at the job's end tells of a failed rank, and better: with its log.
            self._say("hora: " + verdict.paragraph.replace("\n", "\n  "))
        self._late_told |= verdict.kind == "late-rank"
        if stop and not self._averted(verdict):
            self.verdict = verdict
            alarm = {"kind": "alarm", "verdict": json.loads(verdict.line())}
            for link in self._links.values():
                link.send(alarm)
            self._alarmed(verdict)

    def ask_stack(self, rank: int) -> None:
        """Have a rank's stack taken."""
        if rank in self._seats:
            self._seats[rank].ask_stack()
        else:
            self._stacks.ask(rank)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped a rank of this host; of another host its stack's answer tells it."""
        return rank not in self._seats and self._stacks.is_stopped(rank)

    def stopped_children(self, rank: int) -> Mapping[int, str]:
        """The processes that a rank has started and that are stopped: their pids, and what they are."""
        if rank in self._seats:
            return self._seats[rank].stopped
        return {child.pid: str(child) for child in stopped(self._processes[rank].pid)}

    def complain(self, text: str) -> None:
        """Say what is wrong with the guard, or with what it hears."""
        self._complaints += 1
        if self._complaints <= MOST_COMPLAINTS:
            end = " (further ones are not shown)" if self._complaints == MOST_COMPLAINTS else ""
            self._say(f"hora: {text}{end}")

    # --- what happens ---------------------------------------------------------------------------

    def _receive(self, rank: int, record: Mapping[str, Any]) -> None:
        with self._unharmed():
            if self._judge is not None:
                self._judge.receive(rank, record)
        self._soon()

    def _unheard(self, rank: int) -> None:
        if self._judge is not None:
            self._judge.unheard_of(rank)
            self._soon()

    def _stack(self, rank: int, text: str) -> None:
        with self._unharmed():
            if self._judge is not None:
                self._judge.stack(rank, text)
        self._soon()

    def _soon(self) -> None:
        """Let the judge look when all that came at the same time has been taken in."""
        if self._judge is not None:
            self._ticks.by(max(time.monotonic(), self._earliest))

    def _tick(self) -> None:
        began, worked = time.monotonic(), time.thread_time()
        with self._unharmed():
            if self._judge is None or self._judge.stopped:
                return
            patience = self._judge.tick(began)
            self._earliest = time.monotonic() + SHARE * (time.thread_time() - worked)
            self._ticks.at = max(began + patience, self._earliest)

    def _failed(self, rank: int, outcome: Outcome) -> None:
        def judge() -> None:
            if self._judge is not None and not self._judge.stopped:
                self._judge.failed(rank, **what_happened(outcome))

        if self._judge is None or self._judge.stopped:
            return
        if outcome.echo:
            if self._echo is None:
                self._echo = judge
                self._echoes.at = time.monotonic() + ECHO_PATIENCE
            return
        with self._unharmed():
            judge()

    def _believe_echo(self) -> None:
        with self._unharmed():
            if self._echo is not None:
                self._echo()

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        """A fault of the guard's own ends the guard, not the job."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above; it is told
            frame = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__}: {error} at {Path(frame.filename).name}:{frame.lineno}"
            self.complain(f"the guard has a fault and watches no more; the job goes on ({fault})")
            self.silence()
            for link in self._links.values():  # ranks that wait for its word see the end, and go on
                link.close()
