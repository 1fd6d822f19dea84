"""Starts the ranks, stays with them until the last has ended, and brings back the truth.

One thread, one event loop: the ranks' pipes, a pidfd per rank, the status pipe of rank 0, a pipe on
which a rank says that it has failed, and a socket that a signal wakes. Nothing polls.
"""

from __future__ import annotations

import functools
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from hora.core.errors import LaunchError
from hora.core.plural import plural
from hora.core.rundir import RunDirectory
from hora.launch import _start, _tree
from hora.launch._memory import MemoryWatch
from hora.launch._signals import Signals
from hora.launch.failure import Failure, Outcome, judge, parse_record, read_record
from hora.launch.job import Job
from hora.launch.output import Console, ConsoleClosedError, Lines, Log, Tail

__all__ = ["Ended", "Supervisor"]

AFTER_FAILURE = 1.0
"""Seconds that the other ranks get to end by themselves, so that they can tell what they saw."""

ON_ITS_WAY_OUT = 3.0
"""Seconds that a rank gets to end after its exception. Only then do its peers lose their connections."""

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL after a failure."""

INTERRUPT_GRACE = 5.0
"""The same after Ctrl-C, when a rank may want to save something."""

REAPERS = 5
"""How often the reaper is started: something that kills it each time is not answered for ever."""

CHUNK = 1 << 18
LAST_CHUNKS = 64
"""Reads from the pipe of a rank that has ended: more than it holds, as what was forked may write for ever."""

TIMED_OUT = 124
"""Exit code of a job that ran into its timeout, as of coreutils' ``timeout``."""

PIPE_CLOSED = 128 + signal.SIGPIPE


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the job ended.

    Attributes:
        exit_code: 0, or the first failing rank's; 128 + N when signal N ended the job.
        failure: the first failure, if that is why it ended.
        message: one line for a job that was ended otherwise: interrupted, timed out.
        interrupted_by: the signal that ended it.
    """

    exit_code: int
    failure: Failure | None = None
    message: str | None = None
    interrupted_by: int | None = None


@dataclass(kw_only=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Log
    pipes: dict[int, IO[bytes]]  # 0: stdout, 1: stderr; taken out at its end
    lines: tuple[Lines, Lines] = field(default_factory=lambda: (Lines(), Lines()))
    tail: Tail = field(default_factory=Tail)
    outcome: Outcome | None = None
    stop_sent: float | None = None


class Supervisor:
    """Runs one job on this host.

    Call :meth:`run` once, from any thread. The ranks die when the thread that started them ends, and
    :meth:`run` returns only after they have, so a short-lived thread is no danger to them. Signals are
    handled in the main thread alone; elsewhere Ctrl-C reaches the main thread as usual.
    """

    def __init__(self, job: Job, run: RunDirectory) -> None:
        self._job = job
        self._run_directory = run
        self._id = uuid.uuid4().hex
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._began = time.monotonic()
        self._complained = False
        self._stop_at: float | None = None  # SIGTERM
        self._kill_at: float | None = None  # SIGKILL
        self._message: str | None = None
        self._exit_code: int | None = None
        self._failing = False
        self._reapers = 0
        self._failures: int | None = None
        self._records: dict[int, dict[str, Any]] = {}
        self._interrupted_by: int | None = None
        self._status_rest = b""
        self._closing: list[Callable[[], None]] = [self._selector.close]

    def run(self) -> Ended:
        """Start the ranks and wait for their end.

        Raises:
            LaunchError: the ranks could not be started; none of them is left.
        """
        memory = MemoryWatch()
        with Signals(self._kill_now) as signals:
            self._signals = signals
            self._console = Console(prefix=self._job.prefix, quiet=self._job.quiet, wakeup=signals.wakeup)
            if signals.wakeup is not None:
                self._selector.register(signals.wakeup, selectors.EVENT_READ, signals.clear)
            try:
                self._start()
                self._loop()
            finally:
                self._kill_now()
                self._end()
            return self._result(memory)

    # --- start ----------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            starter = _start.Starter(self._job, self._run_directory, self._id)
            self._closing.append(starter.close)
            for number in range(self._job.workers):
                log = Log(self._run_directory.log(number), self._complain)
                process = starter.start(number)
                pipes = {which: pipe for which, pipe in enumerate((process.stdout, process.stderr)) if pipe}
                rank = _Rank(number=number, process=process, log=log, pipes=pipes)
                self._ranks.append(rank)
                for which, pipe in pipes.items():
                    self._watch(pipe.fileno(), functools.partial(self._read, rank, which))
                self._watch_end(rank)
            # After the ranks, which do not wait for it; until it runs, they end by PR_SET_PDEATHSIG.
            self._keep_reaper()
        except OSError as error:
            raise LaunchError(
                f"Only {len(self._ranks)} of {self._job.workers} workers could be started: "
                f"{error.strerror or error}.",
                fix="Start fewer workers with -n, or raise the limits: see ulimit -u and ulimit -n.",
            ) from error
        starter.started()
        self._failures = starter.failures
        os.set_blocking(self._failures, False)
        self._watch(self._failures, self._read_failures)
        self._watch(starter.status, lambda: self._read_status(starter.status))

    def _keep_reaper(self) -> None:
        """Start the reaper, and another one should it be killed before the job has ended."""
        reaper = _tree.Reaper(self._id, [rank.process.pid for rank in self._ranks])
        self._reapers += 1
        fd = _tree.end_descriptor(reaper.process)

        def close() -> None:
            os.close(fd)
            reaper.close()

        def ended() -> None:
            self._selector.unregister(fd)
            self._closing.remove(close)
            close()
            if self._reapers < REAPERS:
                self._keep_reaper()
            else:
                self._complain(
                    "the reaper cannot stay alive; should this launcher be killed, look for leftovers"
                )

        self._closing.append(close)
        self._watch(fd, ended)

    def _watch(self, fd: int, react: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, react)

    def _watch_end(self, rank: _Rank) -> None:
        fd = _tree.end_descriptor(rank.process)

        def ended() -> None:
            self._selector.unregister(fd)
            os.close(fd)
            self._reap(rank)

        self._watch(fd, ended)

    # --- events ---------------------------------------------------------------------------------

    def _loop(self) -> None:
        while any(rank.outcome is None for rank in self._ranks):
            for key, _ in self._selector.select(self._patience()):
                key.data()
            for number in self._signals.take():
                self._halt_on_signal(number)
            self._on_time(time.monotonic())

    def _patience(self) -> float | None:
        """Seconds until the next thing that happens by time alone."""
        times = [at for at in (self._stop_at, self._kill_at, self._timeout_at()) if at is not None]
        times += [lines.redraw for rank in self._ranks for lines in rank.lines if lines.redraw is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _timeout_at(self) -> float | None:
        if self._job.timeout is None or self._exit_code is not None:
            return None
        return self._began + self._job.timeout

    def _on_time(self, now: float) -> None:
        timeout_at = self._timeout_at()
        if timeout_at is not None and now >= timeout_at:
            text = f"hora: stopped after its timeout of {self._job.timeout:g} s"
            self._halt(text, exit_code=TIMED_OUT)
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at, self._kill_at = None, now + GRACE
            self._tell_to_stop()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._kill_now()
        for rank in self._ranks:
            for which, lines in enumerate(rank.lines):
                if lines.redraw is not None and now >= lines.redraw:
                    self._show(rank, which, lines.unfinished(now))

    def _read(self, rank: _Rank, which: int) -> bool:
        """Take in what is there; False when the pipe is empty or at its end."""
        try:
            data = os.read(rank.pipes[which].fileno(), CHUNK)
        except BlockingIOError:
            return False
        if data:
            rank.log.feed(which, data)
            self._show(rank, which, rank.lines[which].feed(data, time.monotonic()))
            return True
        pipe = rank.pipes.pop(which)
        self._selector.unregister(pipe)
        pipe.close()
        self._show(rank, which, rank.lines[which].close())
        return False

    def _show(self, rank: _Rank, which: int, whole: bytes) -> None:
        if which == 1:
            rank.tail.feed(whole)
        try:
            self._console.lines(rank.number, which, whole)
        except ConsoleClosedError:
            self._halt(None, exit_code=PIPE_CLOSED)

    def _drain(self, rank: _Rank) -> None:
        for which in (0, 1):
            for _ in range(LAST_CHUNKS):
                if which not in rank.pipes or not self._read(rank, which):
                    break

    def _reap(self, rank: _Rank) -> None:
        code = rank.process.wait()
        self._read_failures()
        record = read_record(self._run_directory.failure(rank.number)) or self._records.get(rank.number)
        rank.outcome = Outcome(
            rank=rank.number, code=code, ended=time.time(), stop_sent=rank.stop_sent, record=record, tail=()
        )
        self._drain(rank)
        rank.outcome.tail = rank.tail.text()
        if record is not None:
            rank.log.feed(1, record["traceback"].encode("utf-8", "backslashreplace"))
        if rank.outcome.failed:
            self._on_failure(AFTER_FAILURE)

    def _read_failures(self) -> None:
        """Ranks say that their failure file is there, or send it, when the disk could not take it."""
        if self._failures is None:
            return
        try:
            data = os.read(self._failures, CHUNK)
        except BlockingIOError:
            return
        if not data:  # all ranks have closed their ends
            self._selector.unregister(self._failures)
            self._failures = None
            return
        for line in data.decode("utf-8", "replace").splitlines():
            record = parse_record(line)
            if record is not None:
                self._records[int(record["rank"])] = record
        self._on_failure(ON_ITS_WAY_OUT)  # the rank itself may hang on its way out

    def _on_failure(self, patience: float) -> None:
        if self._exit_code is not None:
            return
        at = time.monotonic() + patience
        if not self._failing:
            self._failing, self._stop_at = True, at
        elif self._stop_at is not None:
            self._stop_at = min(self._stop_at, at)

    def _read_status(self, fd: int) -> None:
        data = os.read(fd, CHUNK)
        if not data:
            self._selector.unregister(fd)
            return
        *lines, self._status_rest = (self._status_rest + data).split(b"\n")
        self._status_rest = self._status_rest[-CHUNK:]
        if self._job.quiet or not lines:
            return
        _start.show_status(self._console, [line.decode("utf-8", "replace") for line in lines], self._job)

    def _complain(self, text: str) -> None:
        if not self._complained:
            self._complained = True
            self._console.say(f"hora: {text}")

    # --- stopping -------------------------------------------------------------------------------

    def _halt_on_signal(self, number: int) -> None:
        seconds = time.monotonic() - self._began
        how = {signal.SIGINT: "interrupted", signal.SIGHUP: "hung up"}.get(
            signal.Signals(number), "terminated"
        )
        self._interrupted_by = self._interrupted_by or number
        self._halt(f"hora: {how} after {seconds:.0f} s", exit_code=128 + number)

    def _halt(self, message: str | None, *, exit_code: int) -> None:
        """End the job for a reason of our own. The first reason counts, and a failure is one."""
        if self._exit_code is not None or self._kill_at is not None:
            return
        if not self._failing:
            self._exit_code, self._message = exit_code, message
        self._console.mute(0)
        self._console.mute(1)
        self._stop_at, self._kill_at = None, time.monotonic() + INTERRUPT_GRACE
        self._tell_to_stop()

    def _tell_to_stop(self) -> None:
        """SIGTERM to the ranks alone: their loader workers must live until the rank has saved its state."""
        for rank in self._alive():
            if rank.process.poll() is None:  # else it has ended by itself, and its event is on the way
                rank.stop_sent = time.time()
                rank.process.send_signal(signal.SIGTERM)

    def _kill_now(self) -> None:
        """SIGKILL to the ranks and all that shares their process groups. Also called by a signal handler."""
        for rank in self._alive():
            rank.stop_sent = rank.stop_sent or time.time()
            _tree.kill_group(rank.process)

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.outcome is None]

    # --- end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Leave nothing behind: no process, no descriptor."""
        for rank in self._alive():  # only after an error in the loop itself
            rank.outcome = Outcome(
                rank=rank.number, code=rank.process.wait(), ended=time.time(), stop_sent=0.0
            )
        leftovers = _tree.sweep(self._id, [rank.process.pid for rank in self._ranks])
        if leftovers and self._exit_code is None:
            names = ", ".join(leftovers[:4]) + (", ..." if len(leftovers) > 4 else "")
            many = "processes that the ranks" if len(leftovers) > 1 else "process that a rank"
            self._console.say(f"hora: stopped {len(leftovers)} {many} left behind: {names}")
        for rank in self._ranks:
            self._drain(rank)
            for which in rank.pipes:
                self._show(rank, which, rank.lines[which].close())
            for pipe in rank.pipes.values():
                pipe.close()
            rank.pipes.clear()
            rank.log.close()
        self._console.close()
        for close in reversed(self._closing):
            close()

    def _result(self, memory: MemoryWatch) -> Ended:
        outcomes = [rank.outcome for rank in self._ranks if rank.outcome is not None]
        if self._exit_code is not None:
            message = self._message
            if message is not None:
                stopped = sum(rank.stop_sent is not None for rank in self._ranks)
                message += f"; {stopped} {plural(stopped, 'worker')} stopped."
            return Ended(exit_code=self._exit_code, message=message, interrupted_by=self._interrupted_by)
        reason = memory.rose()
        for outcome in outcomes:
            outcome.memory = reason
        failure = judge(outcomes, self._run_directory)
        return Ended(exit_code=failure.exit_code if failure else 0, failure=failure)
