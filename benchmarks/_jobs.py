"""Jobs of several ranks that wait for a driver's orders, so that contenders can run one burst at a time.

The driver forks the ranks of a job, or starts them by a command such as ``mpiexec``. Each connects to the
driver's socket and sleeps in it between two orders, so that only the contender whose turn it is computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

Message = dict[str, Any]
Handler = Callable[[Message], Message]
Run = Callable[[], object]

DRIVER = "BENCHMARK_DRIVER"
"""Variable that tells a rank which was started by a command where its driver listens."""

PATIENCE = 300.0
"""Seconds until a rank that does not answer counts as hung."""


class JobError(Exception):
    """A rank failed, ended or hung; the text says which one and shows its last output."""


@dataclass(frozen=True)
class Place:
    """Where a rank is: its job's folder is empty at the start, and its port free."""

    rank: int
    size: int
    folder: Path
    port: int

    @property
    def store(self) -> str:
        return f"file://{self.folder / 'store'}"


@dataclass
class Job:
    """The ranks of one job."""

    name: str
    folder: Path
    links: list[_Link] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def ask(self, order: Message) -> list[Message]:
        """Give every rank the order, and return their answers by rank."""
        for link in self.links:
            link.send(order)
        return self.answers()

    def burst(self, name: str, *, calls: int = 1, warm: int = 1) -> float:
        """Seconds per call of the slowest rank, after ``warm`` calls that are not timed."""
        answers = self.ask({"burst": name, "calls": calls, "warm": warm})
        return max(float(answer["seconds"]) for answer in answers)

    def answers(self) -> list[Message]:
        found: dict[int, Message] = {}
        until = time.monotonic() + PATIENCE
        waiting = dict(enumerate(self.links))
        while waiting:
            ready = select.select(list(waiting.values()), [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise self.failure(min(waiting), f"did not answer within {PATIENCE:.0f} s")
            for rank in [rank for rank, link in waiting.items() if link in ready]:
                answer = waiting.pop(rank).receive()
                if answer is None:
                    raise self.failure(rank, "ended")
                if "failed" in answer:
                    raise self.failure(rank, f"failed: {answer['failed']}")
                found[rank] = answer
        return [found[rank] for rank in range(len(self.links))]

    def failure(self, rank: int, text: str) -> JobError:
        with contextlib.suppress(OSError):
            text += "\n" + (self.folder / f"log-{rank}").read_text(errors="replace")[-2000:]
        return JobError(f"rank {rank} of {self.name} {text}".rstrip())

    def close(self, patience: float = 10.0) -> None:
        """Let the ranks end, which they do when their link closes; kill those that do not."""
        for link in self.links:
            link.close()
        until = time.monotonic() + patience
        for pid in self.pids:
            end = os.pidfd_open(pid)
            if not select.select([end], [], [], max(0.0, until - time.monotonic()))[0]:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(end)
        self.links, self.pids = [], []


class Driver:
    """Starts jobs, and ends those that are left when the block ends."""

    def __enter__(self) -> Driver:
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._path = str(Path(self._folder.name) / "driver")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._path)
        self._socket.listen(64)
        self.jobs: list[Job] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for job in self.jobs:
            job.close(10.0 if kind is None else 0.0)
        self._socket.close()
        self._folder.cleanup()

    def fork(self, name: str, size: int, setup: Callable[[Place], Handler]) -> Job:
        """A job of forked ranks: each calls ``setup`` and then answers orders.

        Fork before the driver has threads. What it has imported need not be imported again.

        Raises:
            JobError: a rank's set-up failed.
        """
        job, port = self._job(name), _free_port()
        for rank in range(size):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                self._become_rank(job, Place(rank, size, job.folder, port), setup)
            job.pids.append(pid)
        return self._met(job, size)

    def command(self, name: str, size: int, command: list[str]) -> Job:
        """A job started by a command, whose ranks call :func:`serve`."""
        job = self._job(name)
        with (job.folder / "log-0").open("wb") as log:
            started = subprocess.Popen(
                command,
                env=os.environ | {DRIVER: self._path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        job.pids.append(started.pid)
        started.returncode = 0  # waited for with the pids of the job
        return self._met(job, size)

    def end(self, job: Job, *, patience: float = 10.0) -> None:
        job.close(patience)
        self.jobs.remove(job)

    def _job(self, name: str) -> Job:
        job = Job(name, Path(tempfile.mkdtemp(dir=self._folder.name)))
        self.jobs.append(job)
        return job

    def _met(self, job: Job, size: int) -> Job:
        links: dict[int, _Link] = {}
        try:
            for _ in range(size):
                if not select.select([self._socket], [], [], PATIENCE / 5)[0]:
                    raise job.failure(0, "did not start")
                link = _Link(self._socket.accept()[0])
                links[int((link.receive() or {})["rank"])] = link
            job.links = [links[rank] for rank in range(size)]
            job.ask({"go": True})
        except JobError:
            self.end(job, patience=0.0)
            raise
        return job

    def _become_rank(self, job: Job, place: Place, setup: Callable[[Place], Handler]) -> NoReturn:
        _die_with_parent()
        self._socket.close()
        for other in self.jobs:  # else they would not see their links close
            for link in other.links:
                link.close()
        with (job.folder / f"log-{place.rank}").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(_torch_variables(place))
        serve(lambda: setup(place), rank=place.rank, path=self._path)
        os._exit(0)


def serve(setup: Callable[[], Handler], *, rank: int, path: str | None = None) -> None:
    """Be a rank: answer the driver's orders until it closes the link."""
    plain = socket.socket(socket.AF_UNIX)
    plain.connect(path or os.environ[DRIVER])
    link = _Link(plain)
    link.send({"rank": rank})
    try:
        if link.receive() is None:  # the word to go: a link never holds two messages
            return
        handler = setup()
        link.send({"ready": True})
        while (order := link.receive()) is not None:
            link.send(handler(order))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the driver tells it
        os.write(2, traceback.format_exc().encode())
        link.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        os._exit(1)


def bursts(prepare: Callable[[Message], Mapping[str, Run]], barrier: Run) -> Handler:
    """A handler of two orders: to prepare something, and to time a burst of calls of what was prepared."""
    prepared: dict[str, Run] = {}

    def handler(order: Message) -> Message:
        if "prepare" in order:
            prepared.clear()  # frees what the last case held
            prepared.update(prepare(order["prepare"]))
            return {"contenders": list(prepared)}
        run = prepared[order["burst"]]
        for _ in range(order["warm"]):
            run()
        barrier()
        start = time.perf_counter()
        for _ in range(order["calls"]):
            run()
        return {"seconds": (time.perf_counter() - start) / order["calls"]}

    return handler


class _Link:
    """One end of a connection, which carries a message per line."""

    def __init__(self, plain: socket.socket) -> None:
        self._socket = plain
        self._lines = plain.makefile("rb")

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        # A rank that has ended is found when its answer is missing.
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        message: Message | None = json.loads(line) if line else None
        return message

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def _torch_variables(place: Place) -> dict[str, str]:
    values = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.rank, "NODE_RANK": 0}
    values |= {"LOCAL_WORLD_SIZE": place.size, "MASTER_PORT": place.port}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _die_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
