"""Starts the ranks, stays with them until the last has ended, and brings back the truth.

One thread, one event loop: the ranks' pipes, a pidfd per rank, the status pipe of rank 0, a pipe on
which a rank says that it has failed, the guard's sockets, and a socket that a signal wakes. Nothing polls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hora.core import settings
from hora.core.errors import LaunchError
from hora.core.notices import EXIT_STOPPED
from hora.core.plural import plural
from hora.core.rundir import RunDirectory
from hora.guard.verdict import Verdict
from hora.launch import _tree
from hora.launch._edges import ASKING, Edges
from hora.launch._ended import Ended
from hora.launch._guard import Guard
from hora.launch._keeper import Keeper
from hora.launch._loop import Loop
from hora.launch._memory import MemoryWatch
from hora.launch._news import News
from hora.launch._ranks import Rank, Ranks
from hora.launch._signals import Signals
from hora.launch._start import Starter
from hora.launch._status import Status
from hora.launch._streams import Streams
from hora.launch.failure import Outcome, judge
from hora.launch.job import Job, rank_environment
from hora.launch.output import Console, Log

__all__ = ["Supervisor"]

AFTER_FAILURE = 1.0
"""Seconds that the other ranks get to end by themselves, so that they can tell what they saw."""

ON_ITS_WAY_OUT = 3.0
"""Seconds that a rank gets to end after its exception. Only then do its peers lose their connections."""

AFTER_ALARM = 2.0
"""Seconds that ranks get to raise a verdict and end."""

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL after a failure."""

INTERRUPT_GRACE = 5.0
"""The same after Ctrl-C, when a rank may want to save something."""

TIMED_OUT = 124
"""Exit code of a job that ran into its timeout, as of coreutils' ``timeout``."""

PIPE_CLOSED = 128 + signal.SIGPIPE


class Supervisor:
    """Runs one job on this host.

    Call :meth:`run` once, from any thread. The ranks die when the thread that started them ends, and
    :meth:`run` returns only after they have, so a short-lived thread is no danger to them. Signals are
    handled in the main thread alone; elsewhere Ctrl-C reaches the main thread as usual.

    Args:
        job: what to run.
        run: where its logs go.
        announce: whether a verdict that stops the job is shown when it is found.
        began: when the job began, ``time.monotonic()``, if not now: its ranks were started before.
    """

    def __init__(
        self, job: Job, run: RunDirectory, *, announce: bool = True, began: float | None = None
    ) -> None:
        self._job = job
        self._run_directory = run
        self._announce = announce
        self._id = uuid.uuid4().hex
        self._loop = Loop()
        self._ranks = Ranks()
        self._began = time.monotonic() if began is None else began
        self._complained = False
        self._timeout = self._loop.timer(self._on_timeout)
        self._stop = self._loop.timer(self._on_stop)  # SIGTERM
        self._kill = self._loop.timer(self._ranks.kill)  # SIGKILL
        self._redraw = self._loop.timer(self._draw)
        self._edges = Edges()
        self._grace = self._loop.timer(self._on_grace)  # for a step edge
        self._grace_seconds = settings.load(rank_environment(job)).stop_grace
        self._asked_by: int | None = None
        self._message: str | None = None
        self._waits = ""
        self._exit_code: int | None = None
        self._failing = False
        self._interrupted_by: int | None = None
        self._closing: list[Callable[[], None]] = [self._loop.close]

    def run(self) -> Ended:
        """Start the ranks and wait for their end.

        Raises:
            LaunchError: the ranks could not be started; none of them is left.
        """
        memory = MemoryWatch()
        with Signals(self._ranks.kill) as signals:
            self._signals = signals
            self._console = Console(prefix=self._job.prefix, quiet=self._job.quiet, wakeup=signals.wakeup)
            self._guard = self._make_guard()
            self._closing.append(self._close_guard)
            if signals.wakeup is not None:
                self._loop.watch(signals.wakeup, signals.clear)
            if self._job.timeout is not None:
                self._timeout.at = self._began + self._job.timeout
            try:
                self._start()
                while self._goes_on():
                    self._loop.turn()
                    for number in signals.take():
                        self._halt_on_signal(number)
                    self._loop.fire()
                self._guard.settle()
            finally:
                self._ranks.kill()
                self._end()
            return self._result(memory)

    def _goes_on(self) -> bool:
        return bool(self._ranks.living)

    def _close_guard(self) -> None:
        self._guard.close()  # the one that there is at the end

    def _make_guard(self) -> Guard:
        return self._guard_of(self._job)

    def _guard_of(self, job: Job, **special: Any) -> Guard:
        return Guard(
            job,
            self._run_directory,
            self._loop,
            say=self._console.say,
            alarmed=self._on_alarm,
            announce=self._announce,
            **special,
        )

    # --- start ----------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._told_if_short():
            starter = Starter(self._job, self._run_directory, self._id)
            self._hear(starter)
            for number in range(self._job.workers):
                self._start_rank(starter, number)
            self._keep()
        starter.started()
        self._guard.all_started()

    @contextlib.contextmanager
    def _told_if_short(self) -> Iterator[None]:
        """The ranks are started in the block."""
        try:
            yield
        except OSError as error:
            raise LaunchError(
                f"Only {len(self._ranks)} of {self._job.workers} workers could be started: "
                f"{error.strerror or error}.",
                fix="Start fewer workers with -n, or raise the limits: see ulimit -u and ulimit -n.",
            ) from error

    def _hear(self, starter: Starter) -> None:
        """Read what the ranks will say, but for what they print."""
        self._closing.append(starter.close)
        self._news = News(
            starter.failures, self._run_directory, self._loop, tell=self._on_news, notice=self._edges.notice
        )
        self._progress = Status(starter.status, self._console, self._job)

        def read() -> None:
            if not self._progress.read():
                self._loop.forget(starter.status)

        self._loop.watch(starter.status, read)

    def _keep(self) -> None:
        """After the ranks, which do not wait for it; until it runs, they end by PR_SET_PDEATHSIG."""
        keeper = Keeper(
            self._id, self._ranks.pids, self._run_directory.path, self._loop, complain=self._complain
        )
        self._closing.append(keeper.close)

    def _start_rank(self, starter: Starter, number: int) -> None:
        process = starter.start(number, self._guard.ends())
        self._follow(number, process)
        self._guard.started(number, process)

    def _follow(self, number: int, process: _tree.Process) -> Rank:
        """A rank runs: read what it prints, and notice its end."""
        streams = Streams(
            number,
            process,
            log=Log(self._run_directory.log(number), self._complain),
            console=self._console,
            loop=self._loop,
            redraw=self._redraw,
            closed=lambda: self._halt(None, exit_code=PIPE_CLOSED),
        )
        rank = Rank(number=number, process=process, streams=streams)
        self._ranks.append(rank)  # from here on it is stopped, whatever else fails
        streams.watch()
        fd = _tree.end_descriptor(process)

        def ended() -> None:
            self._loop.forget(fd)
            os.close(fd)
            self._reap(rank)

        self._loop.watch(fd, ended)
        return rank

    # --- events ---------------------------------------------------------------------------------

    def _reap(self, rank: Rank) -> None:
        outcome = self._take_outcome(rank)
        self._guard.ended(outcome)
        if outcome.failed:
            # One that was told of a failure must not shorten the time of the one that failed.
            self._on_failure(ON_ITS_WAY_OUT if outcome.told else AFTER_FAILURE)

    def _take_outcome(self, rank: Rank) -> Outcome:
        code = rank.process.wait()
        self._news.read()
        record = self._news.record(rank.number)
        rank.streams.drain()
        outcome = rank.outcome = Outcome(
            rank=rank.number,
            code=code,
            ended=time.time(),
            stop_sent=rank.stop_sent,
            record=record,
            tail=rank.streams.tail(),
            suspended=code == EXIT_STOPPED and rank.number in self._edges.stopped,
        )
        if record is not None:
            rank.streams.log.feed(1, record["traceback"].encode("utf-8", "backslashreplace"))
        return outcome

    def _on_news(self, rank: int, record: Mapping[str, Any]) -> None:
        """A rank has raised. It may hang on its way out."""
        if self._exit_code is None:
            self._guard.raised(rank, record)
        self._on_failure(ON_ITS_WAY_OUT)

    def _on_alarm(self, verdict: Verdict) -> None:
        """The ranks are raising a verdict."""
        if verdict.kind != "rank-failed":
            self._on_failure(AFTER_ALARM)

    def _on_failure(self, patience: float) -> None:
        if self._exit_code is not None:
            return
        at = time.monotonic() + patience
        if not self._failing:
            self._failing, self._stop.at = True, at
        elif self._stop.at is not None:
            self._stop.by(at)

    def _on_timeout(self) -> None:
        if self._exit_code is None:
            text = f"hora: stopped after its timeout of {self._job.timeout:g} s"
            self._halt(text, exit_code=TIMED_OUT)

    def _on_stop(self) -> None:
        self._kill.at = time.monotonic() + GRACE
        self._ranks.stop()

    def _draw(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            rank.streams.draw(now)

    def _complain(self, text: str) -> None:
        if not self._complained:
            self._complained = True
            self._console.say(f"hora: {text}")

    # --- stopping -------------------------------------------------------------------------------

    def _halt_on_signal(self, number: int) -> None:
        if number in ASKING and self._ask_to_stop(number):
            return
        seconds = time.monotonic() - self._began
        how = {signal.SIGINT: "interrupted", signal.SIGHUP: "hung up"}.get(
            signal.Signals(number), "terminated"
        )
        self._interrupted_by = self._interrupted_by or number
        self._halt(f"hora: {how} after {seconds:.0f} s", exit_code=128 + number)

    def _ask_to_stop(self, number: int) -> bool:
        """Have the ranks save at their next step edge and stop; False where they cannot, or were asked."""
        busy = self._exit_code is not None or self._failing or self._asked_by is not None
        if busy or not self._able():
            return False
        self._asked_by = self._interrupted_by = number
        self._grace.at = time.monotonic() + self._grace_seconds
        if not self._job.quiet:
            self._console.say(
                f"hora: {signal.Signals(number).name}: saving at the next step edge, then stopping "
                f"(at most {self._grace_seconds:g} s; a second signal stops at once)"
            )
        self._ask()
        return True

    def _able(self) -> bool:
        return self._edges.able(rank.number for rank in self._ranks.living)

    def _ask(self) -> None:
        self._ranks.ask()

    def _on_grace(self) -> None:
        """The ranks know, and have not stopped: SIGTERM would tell them nothing new."""
        if self._asked_by is not None and self._exit_code is None and not self._failing:
            name = signal.Signals(self._asked_by).name
            self._halt(
                f"hora: stopped by {name} without a checkpoint: the ranks did not come to a step edge and "
                f"save within {self._grace_seconds:g} s (HORA_STOP_GRACE)",
                exit_code=128 + self._asked_by,
            )
            self._ranks.kill()

    def _halt(self, message: str | None, *, exit_code: int) -> None:
        """End the job for a reason of our own. The first reason counts, and a failure is one."""
        if self._exit_code is not None or self._kill.at is not None:
            return
        if not self._failing:
            self._exit_code, self._message, self._waits = exit_code, message, self._guard.waits()
        self._guard.silence()
        self._console.mute(0)
        self._console.mute(1)
        self._stop.at, self._kill.at = None, time.monotonic() + INTERRUPT_GRACE
        self._ranks.stop()

    # --- end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Leave nothing behind: no process, no descriptor."""
        self._ranks.collect()
        leftovers = _tree.sweep(self._id, self._ranks.pids)
        if leftovers and self._exit_code is None:
            names = ", ".join(leftovers[:4]) + (", ..." if len(leftovers) > 4 else "")
            many = "processes that the ranks" if len(leftovers) > 1 else "process that a rank"
            self._console.say(f"hora: stopped {len(leftovers)} {many} left behind: {names}")
        for rank in self._ranks:
            rank.streams.close()
        self._console.close()
        for close in reversed(self._closing):
            close()

    def _outcomes(self) -> list[Outcome]:
        """The ends that tell how the job ended."""
        return [rank.outcome for rank in self._ranks if rank.outcome is not None]

    def _size(self) -> int:
        """Number of ranks at the end."""
        return len(self._ranks)

    def _result(self, memory: MemoryWatch) -> Ended:
        outcomes = self._outcomes()
        if self._exit_code is not None:
            message = self._message
            if message is not None:
                stopped = sum(rank.stop_sent is not None for rank in self._ranks)
                message += f"; {stopped} {plural(stopped, 'worker')} stopped."
                message += f"\n  {self._waits}" if self._waits else ""
            return Ended(
                exit_code=self._exit_code,
                message=message,
                interrupted_by=self._interrupted_by,
                saved=self._edges.saved,
            )
        reason = memory.rose()
        for outcome in outcomes:
            outcome.memory = reason
        failure = judge(outcomes, self._run_directory, verdict=self._guard.verdict, size=self._size())
        if failure is None and any(outcome.suspended for outcome in outcomes):
            return Ended(
                exit_code=EXIT_STOPPED,
                message=self._edges.farewell(
                    self._run_directory, asked_by=self._asked_by, elastic=self._job.elastic is not None
                ),
                interrupted_by=self._interrupted_by,
                saved=self._edges.saved,
            )
        code = failure.exit_code if failure else 0
        return Ended(exit_code=code, failure=failure, saved=self._edges.saved)
