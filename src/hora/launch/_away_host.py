"""One other host of a job, as the supervisor handles it: the remote shell, and the agent at its other end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hora.core.rundir import RunDirectory
from hora.core.settings import Settings
from hora.launch import _network, _tree
from hora.launch._away import AwayLink, AwayProcess, Seat
from hora.launch._away_job import begin
from hora.launch._channel import Channel
from hora.launch._loop import Loop
from hora.launch._network import Address
from hora.launch._remote_shell import command
from hora.launch.job import HERE, Job

__all__ = ["AwayHost", "Ears"]

START = 30.0
"""Seconds that the remote shell and the agent may take until they answer."""

MARGIN = 0.5
"""Seconds after the end of its lease in which an agent has surely killed its workers."""

ENDING = 0.5
"""Seconds that the remote shell may take to end when it has closed its stdout."""

LAST_WORDS = 2000
"""Bytes kept of what the remote shell prints on stderr."""


class Ears(Protocol):
    """Who hears what comes from other hosts."""

    def output(self, worker: int, which: int, data: bytes) -> None:
        """A worker has printed, on stdout (0) or stderr (1)."""

    def status(self, data: bytes) -> None:
        """Progress, as rank 0 tells it."""

    def raised(self, worker: int, record: Mapping[str, Any]) -> None:
        """A worker has failed by an exception."""

    def notice(self, record: Mapping[str, Any]) -> None:
        """A worker tells what it has saved, and the like."""

    def complain(self, text: str) -> None:
        """Something is wrong, but goes on."""


class AwayHost:
    """Starts an agent on a host, and speaks with it.

    Args:
        name: of the host.
        number: different for each agent of the job.
        job: what is run.
        run: its run directory.
        job_id: the mark of its processes.
        slots: workers that the host is to have at most.
        chosen: the settings.
        loop: of the supervisor.
        ears: hears of the workers.
        begun: called when workers can be started there.
        gone: called when that is over, with why, and with when the last of them has surely ended.

    Attributes:
        ready: whether workers can be started.
        began: whether they could.
        address: at which other hosts reach it.
        peer: the same of this host.
        spare_port: one that was free there when it began.
        port: of the socket on which a store can listen there; None: not known yet.
        counted: whether the loss of this host has been counted.
    """

    def __init__(
        self,
        name: str,
        number: int,
        job: Job,
        run: RunDirectory,
        job_id: str,
        *,
        slots: int,
        chosen: Settings,
        loop: Loop,
        ears: Ears,
        begun: Callable[[AwayHost], None],
        gone: Callable[[AwayHost, str, float], None],
    ) -> None:
        self.name = name
        self.ready = self.began = False
        self.address: Address | None = None
        self.peer: Address | None = None
        self.port: int | None = None
        self.spare_port = 0
        self.counted = False
        self._job, self._run, self._slots = job, run, slots
        self._mark = f"{job_id}.{number}"
        self._silence = chosen.host_silence
        self._network = chosen.network
        self._loop, self._ears, self._begun, self._gone = loop, ears, begun, gone
        self._workers: dict[int, tuple[AwayProcess, AwayLink]] = {}
        self._seats: dict[tuple[int, int], Seat] = {}  # by world and worker
        self._shift = 0.0  # what to add to the host's clock for the date
        self._ticks: float | None = None  # the same for its time.monotonic()
        self._heard: float | None = None
        self._ended = False
        self._leftovers: Sequence[str] = ()
        self._refused = ""
        self._words = b""
        self._shell = subprocess.Popen(
            command(chosen.remote_shell, name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the supervisor's alone
            env={**os.environ, "HORA_JOB": job_id},  # and should that be killed, this ends too
        )
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        assert self._shell.stderr is not None
        self._errors: int | None = os.dup(self._shell.stderr.fileno())
        os.set_blocking(self._errors, False)
        loop.watch(self._errors, self._on_words)
        ends = os.dup(self._shell.stdout.fileno()), os.dup(self._shell.stdin.fileno())
        for pipe in (self._shell.stdin, self._shell.stdout, self._shell.stderr):
            pipe.close()
        self._channel = Channel(*ends, loop, receive=self._receive, closed=self._on_closed, skip=True)
        self._limit = loop.timer(self._on_silence)
        self._limit.at = time.monotonic() + START

    # --- what the supervisor does -------------------------------------------------------------------

    def start(
        self, number: int, take: Callable[[Mapping[str, Any]], None], **fixed: Any
    ) -> tuple[AwayProcess, AwayLink]:
        """Start a worker.

        Args:
            number: the worker's.
            take: gets what it says about the worlds.
            fixed: of a job that is not elastic: its place, see :meth:`AgentWorker.fixed`.
        """
        process = AwayProcess(number, self.name, self._channel.send)
        link = AwayLink("control", self._channel.send, receive=take, worker=number)
        self._workers[number] = process, link
        self._channel.send("start", worker=number, **fixed)
        return process, link

    def take_port(self) -> int:
        """The port on which the store of the next world listens there; another one is kept then."""
        port, self.port = self.port, None
        assert port is not None, "a worker of this host is ready, which was started after the port was told"
        return port

    def seat(self, world: int, worker: int) -> Seat:
        """A place at the guard of this world for one of its workers."""
        seat = self._seats[world, worker] = Seat(
            self._channel.send, world=world, worker=worker, shift=lambda: self._ticks or 0.0
        )
        return seat

    def join(
        self,
        world: int,
        worker: int,
        record: Mapping[str, Any],
        *,
        rank: int,
        size: int,
        guard: bool,
    ) -> None:
        """Tell a worker which world it belongs to.

        Args:
            world: its number.
            worker: the worker's.
            record: as it gets it, but for its descriptors.
            rank: its rank.
            size: number of ranks.
            guard: whether the guard watches.
        """
        for key in [key for key in self._seats if key[0] < world]:
            del self._seats[key]
        self._channel.send(
            "join",
            world=world,
            worker=worker,
            record=dict(record),
            rank=rank,
            size=size,
            guard=guard,
            serves=rank == 0,  # it gets the socket of the port that was told
        )

    def close(self, seconds: float) -> Sequence[str]:
        """The job has ended: wait so long for the agent to clear up; what it had to kill there."""
        self.end()
        self._loop.until(lambda: not self._channel.open, seconds)
        self._clear_up()
        return self._leftovers

    def end(self) -> None:
        """Have the agent clear up, and end; :meth:`close` follows."""
        self._ended, self.ready = True, False
        self._channel.send("end")

    def keep(self) -> None:
        """Answer the agent's signs of life, though nothing else can be done now."""
        self._channel.ahead("beat")

    # --- the end ----------------------------------------------------------------------------------

    def _on_silence(self) -> None:
        if self._heard is None:
            self._lose(f"no answer came within {START:g} s{self._last_words()}")
        else:
            self._lose(f"nothing was heard from it for {self._silence + MARGIN:g} s")

    def _on_closed(self, why: str) -> None:
        if self._ended:
            self._clear_up()
            return
        try:
            code = self._shell.wait(ENDING)
        except subprocess.TimeoutExpired:  # it has only closed its stdout
            code = None
        self._on_words()
        how = "" if code is None else f" with exit code {code if code >= 0 else 128 - code}"
        self._lose(why or f"its remote shell has ended{how}{self._last_words()}")

    def _lose(self, why: str) -> None:
        if self._ended:
            self._clear_up()
            return
        self._ended, self.ready = True, False
        self._clear_up()
        heard = self._heard
        surely = time.monotonic() if heard is None else heard + self._silence + MARGIN
        for process, _ in self._workers.values():
            process.end(-signal.SIGKILL, lost=f"its host {self.name} is lost: {why}")
        self._gone(self, why, surely)

    def _clear_up(self) -> None:
        self._loop.drop(self._limit)
        self._channel.close()
        if self._shell.poll() is None:
            _tree.kill_group(self._shell)
            self._shell.wait()
        if self._errors is not None:
            self._loop.forget(self._errors)
            os.close(self._errors)
            self._errors = None

    def _on_words(self) -> None:
        """What the remote shell, or the agent, says on stderr."""
        while self._errors is not None:
            try:
                data = os.read(self._errors, LAST_WORDS)
            except BlockingIOError:
                return
            if not data:
                self._loop.forget(self._errors)
                os.close(self._errors)
                self._errors = None
            self._words = (self._words + data)[-LAST_WORDS:]

    def _last_words(self) -> str:
        words = self._words.strip() or self._channel.noise.strip()
        last = words.decode("utf-8", "replace").splitlines()[-1:]
        return f": {last[0].strip()}" if last else ""

    # --- what the agent says ------------------------------------------------------------------------

    def _receive(self, record: Mapping[str, Any], payload: bytes) -> None:
        kind = record["kind"]
        if kind == "beat":
            self._heard = time.monotonic()
            if not self._ended:
                self._limit.at = self._heard + self._silence + MARGIN
            self._channel.send("beat", number=record["number"])
        elif kind == "hello":
            self._shift = time.time() - record["time"]
            self.spare_port = int(record["spare_port"])
            self._meet([Address(*each) for each in record["addresses"]])
        elif kind == "begun":
            self.ready = self.began = True
            self._begun(self)
        elif kind == "refused":
            self._lose(f"{record['what']} {record['fix']}")
        elif kind == "port":
            self.port = int(record["port"])
        elif kind == "bye":
            self._leftovers = [f"{name} on {self.name}" for name in record["leftovers"]]
        elif kind == "status":
            self._ears.status(payload)
        elif kind == "notice":
            self._ears.notice(record["record"])
        elif kind == "complain":
            self._ears.complain(f"{self.name}: {record['text']}")
        else:
            self._receive_of(int(record["worker"]), kind, record, payload)

    def _meet(self, addresses: Sequence[Address]) -> None:
        """The agent answers."""
        both = _network.choose({HERE: _network.addresses(), self.name: addresses}, self._network)
        self.peer, self.address = both.get(HERE), both.get(self.name)
        if self.address is None:
            which = "network address" if self._network is None else f"address that fits {self._network}"
            self._lose(f"it has no {which}: write --network with what the hosts share")
            return
        told = begin(self._job, self._run, mark=self._mark, slots=self._slots, silence=self._silence)
        self._channel.send("begin", **told)
        self._channel.send("listen", address=self.address.address)

    def _receive_of(self, worker: int, kind: str, record: Mapping[str, Any], payload: bytes) -> None:
        process, link = self._workers[worker]
        seat = self._seats.get((record.get("world", -1), worker))
        if kind == "output":
            self._ears.output(worker, record["which"], payload)
        elif kind == "control":
            link.take(record["record"])
        elif kind == "guard" and seat is not None:
            seat.link.take(record["record"])
        elif kind == "guard-end" and seat is not None:
            seat.link.close()
        elif kind == "board":
            # Of all messages the quickest tells best how far the clocks are apart.
            shift = time.monotonic() - record["now"]
            self._ticks = shift if self._ticks is None else min(self._ticks, shift)
            if seat is not None:
                seat.take_board(zlib.decompress(payload))
        elif kind == "stack":
            children = {int(pid): name for pid, name in record["children"].items()}
            for (_, number), each in self._seats.items():
                if number == worker:
                    each.take_stack(payload.decode("utf-8", "replace"), children)
        elif kind == "raised":
            told = dict(record["record"])
            told["time"] = float(told["time"]) + self._shift
            self._ears.raised(worker, told)
        elif kind == "started":
            process.pid = int(record["pid"])
        elif kind == "failed":
            process.end(1, lost=f"it could not be started on {self.name}: {record['why']}")
        elif kind == "exit":
            process.end(int(record["code"]))
