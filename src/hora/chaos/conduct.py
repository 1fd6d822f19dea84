"""One run of a job from its start to its end, disturbed as the schedule says.

One loop that sleeps until the launcher ends, a rank rings the bell, a checkpoint is begun or committed, or
something is due.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hora.chaos.acts import Acts, Done
from hora.chaos.folders import Folders
from hora.chaos.processes import MARK
from hora.chaos.schedule import Anchor, Disturbance
from hora.chaos.stage import Stage
from hora.core.journal import BELL, Entry, parse

__all__ = ["Ended", "conduct"]

PATIENCE = 15.0
"""Seconds between SIGTERM and SIGKILL to a launcher that does not end; it has to stop its ranks."""


@dataclass(kw_only=True)
class Ended:
    """How a run went.

    Attributes:
        exit_code: of the launcher; None: it did not end in time.
        seconds: from the start of the first rank to its end.
        started: ``time.time()`` of that start; None: no rank has started.
        saves: (step in its name, begun, committed or None) of each checkpoint, in ``time.time()``.
        done: the disturbances that have taken place.
        missed: those for which the run was over too soon.
        pids: of all ranks.
    """

    exit_code: int | None
    seconds: float
    started: float | None
    saves: list[tuple[int, float, float | None]]
    done: list[Done] = field(default_factory=list)
    missed: list[Disturbance] = field(default_factory=list)
    pids: frozenset[int] = frozenset()


def conduct(
    stage: Stage,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    journals: Path,
    output: Path,
    timeout: float | None,
    schedule: Sequence[Disturbance] = (),
    progress: Callable[[Entry], int] = lambda entry: entry.number,
    say: Callable[[str], None] = lambda line: None,
) -> Ended:
    """Run a job to its end.

    Args:
        stage: where it runs.
        command: of the launcher.
        environ: its environment, without what this module adds.
        journals: folder that gets those of the ranks; its path is short, as it holds a socket.
        output: file that gets what the launcher prints.
        timeout: seconds after which the job is stopped; None: never.
        schedule: what is done to it.
        progress: how many steps of the training a rank has made that has written this entry.
        say: told each disturbance.

    Raises:
        ChaosError: a disturbance is impossible here.
    """
    return _Conductor(stage, journals, schedule, progress, say).run(command, environ, output, timeout)


class _Conductor:
    def __init__(
        self,
        stage: Stage,
        journals: Path,
        schedule: Sequence[Disturbance],
        progress: Callable[[Entry], int],
        say: Callable[[str], None],
    ) -> None:
        self._stage, self._journals, self._progress, self._say = stage, journals, progress, say
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._armed = list(schedule)
        self._waiting: list[Disturbance] = []
        self._counts: dict[Anchor, int] = dict.fromkeys(("started", "step", "saving", "saved"), 0)
        self._done: list[Done] = []
        self._started: float | None = None
        self._saves: dict[str, tuple[int, float, float | None]] = {}
        self._ranks: dict[int, int] = {}  # process -> rank, as it was in its last step
        self._pids: set[int] = set()
        self._serial = 0

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], output: Path, timeout: float | None
    ) -> Ended:
        marked = {**environ, MARK: str(self._journals)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.setblocking(False)
            bell.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            bell.bind(str(self._journals / BELL))
            self._bell = bell
            self._stage.start(command, marked, output)
            ended = os.pidfd_open(self._stage.process.pid)
            folders = Folders(self._stage.folder)
            self._acts = Acts(self._stage, str(self._journals), at=self._at)
            try:
                code = self._wait(ended, folders, timeout)
            finally:
                self._stop(ended)
                self._acts.close()
                folders.close()
                os.close(ended)
        now = time.time()
        missed = [*self._armed, *self._waiting, *self._scheduled()]
        return Ended(
            exit_code=code,
            seconds=now - (now if self._started is None else self._started),
            started=self._started,
            saves=list(self._saves.values()),
            done=self._done,
            missed=sorted(missed, key=lambda one: one.number),
            pids=frozenset(self._pids),
        )

    # --- the loop -------------------------------------------------------------------------------

    def _wait(self, ended: int, folders: Folders, timeout: float | None) -> int | None:
        poll = select.poll()
        for source in (ended, self._bell.fileno(), folders.fileno()):
            poll.register(source, select.POLLIN)
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            times = [one[0] for one in self._due[:1]] + ([] if limit is None else [limit])
            pause = max(0.0, min(times) - time.monotonic()) * 1000 if times else None
            ready = {source for source, _ in poll.poll(None if pause is None else pause + 0.5)}
            if self._bell.fileno() in ready:
                self._listen()
            if folders.fileno() in ready:
                for saved in folders.read():
                    self._on_save(saved.what, saved.folder, saved.step)
            if ended in ready:
                return self._stage.process.wait()
            if limit is not None and time.monotonic() >= limit:
                return None
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()

    def _listen(self) -> None:
        while True:
            try:
                line = self._bell.recv(1 << 16)
            except BlockingIOError:
                return
            if line.isdigit():
                self._on_start(int(line))
            else:
                self._on_step(parse(line))

    def _on_start(self, pid: int) -> None:
        self._pids.add(pid)
        if self._started is None:
            self._started = time.time()
            self._reach("seconds", 1)
        self._reach("started", self._counts["started"] + 1)
        self._try_again()

    def _on_step(self, entry: Entry) -> None:
        self._ranks[entry.pid] = entry.rank
        self._reach("step", self._progress(entry))

    def _on_save(self, what: Anchor, folder: str, step: int) -> None:
        _, begun, _ = self._saves.get(folder, (step, time.time(), None))
        self._saves[folder] = (step, begun, time.time() if what == "saved" else None)
        self._reach(what, self._counts[what] + 1)
        if what == "saved":
            self._try_again()

    def _try_again(self) -> None:
        """There is a rank, or a checkpoint, that there was not."""
        again, self._waiting = self._waiting, []
        for one in again:
            self._act(one)

    def _reach(self, anchor: Anchor, count: int) -> None:
        """So many of these there are now: what was waiting for that gets its time."""
        if count <= self._counts.get(anchor, 0):
            return
        self._counts[anchor] = count
        reached = [one for one in self._armed if one.anchor == anchor and one.count <= count]
        for one in reached:
            self._armed.remove(one)
            self._later(one.after, _Turn(self._act, one))

    def _later(self, seconds: float, turn: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._serial, turn))

    def _scheduled(self) -> list[Disturbance]:
        return [turn.one for _, _, turn in self._due if isinstance(turn, _Turn)]

    # --- disturbances ---------------------------------------------------------------------------

    def _act(self, one: Disturbance) -> None:
        done = self._acts.perform(one, step=self._counts["step"], ranks=self._ranks)
        if done is None:
            self._waiting.append(one)
            return
        self._done.append(done)
        self._say(done.line(self._started or done.time))
        follower = [
            other for other in self._armed if other.anchor == "disturbed" and other.count == one.number
        ]
        for other in follower:
            self._armed.remove(other)
            self._later(other.after, _Turn(self._act, other))

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        self._later(seconds, call)

    def _stop(self, ended: int) -> None:
        """The launcher, if it has not ended by itself."""
        if self._stage.process.poll() is not None:
            return
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(ended, number)
            if poll.poll(PATIENCE * 1000):
                break
        self._stage.process.wait()


@dataclass(frozen=True)
class _Turn:
    act: Callable[[Disturbance], None]
    one: Disturbance

    def __call__(self) -> None:
        self.act(self.one)
