"""The agent: starts and watches a job's workers on another host, and does there what the supervisor says.

It speaks with the supervisor over the remote shell that started it, and listens to nobody else. It holds a
*lease*: each sign of life that the supervisor answers prolongs it by a few seconds, from the moment when it
was sent. Without a lease, or when the shell ends, all workers here are killed. The supervisor waits longer
than that before it counts them as lost, so that there are never two worlds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hora.core.errors import HoraError, LaunchError
from hora.core.rundir import RunDirectory, disk_errors
from hora.core.version import VERSION
from hora.launch import _network, _reaper, _tree
from hora.launch._agent_workers import AgentWorker, World, fixed, free
from hora.launch._channel import MARK, Channel
from hora.launch._elastic_workers import ElasticStarter
from hora.launch._keeper import Keeper
from hora.launch._loop import Loop
from hora.launch._news import News
from hora.launch._stacks import Stacks
from hora.launch._start import RankStarter, free_port
from hora.launch.job import Elastic, Job, ModuleTarget, ScriptTarget, check

__all__ = ["Agent", "main"]

BEATS = 8
"""Signs of life in the time after which a silent host counts as lost."""

LOOK = 0.25
"""Seconds between two looks at what the ranks write on the board."""

FAREWELL = 2.0
"""Seconds in which the last messages leave."""

STATUS_CHUNK = 1 << 18


class Agent:
    """Runs on one host, until the job has ended or is out of reach.

    Args:
        reader: the supervisor's messages come here.
        writer: and those to it go here.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._loop = Loop()
        self._channel = Channel(
            reader, writer, self._loop, receive=self._receive, closed=self._on_closed, room=self._on_room
        )
        self._workers: dict[int, AgentWorker] = {}
        self._world: World | None = None
        self._starter: ElasticStarter | RankStarter | None = None
        self._keeper: Keeper | None = None
        self._listening: socket.socket | None = None
        self._address = ""
        self._mark = ""
        self._silence = 0.0
        self._sent: dict[int, float] = {}
        self._beats = 0
        self._lease = self._loop.timer(self._on_silence)
        self._beat = self._loop.timer(self._on_beat)
        self._look = self._loop.timer(self._on_look)
        self._stacks = Stacks(self._loop, self._on_stack)
        self._ended = False

    def run(self) -> None:
        """Say who we are, and do what is said."""
        addresses = [list(address) for address in _network.addresses()]
        self._channel.send(
            "hello", version=VERSION, addresses=addresses, time=time.time(), spare_port=free_port()
        )
        try:
            while not self._ended:
                self._loop.turn()
                self._loop.fire()
        finally:
            self._finish()

    # --- the end ----------------------------------------------------------------------------------

    def _on_closed(self, why: str) -> None:
        self._ended = True

    def _on_silence(self) -> None:
        print(f"nothing was heard from the launcher for {self._silence:g} s", file=sys.stderr)
        self._ended = True

    def _finish(self) -> None:
        """Leave nothing behind."""
        for worker in self._workers.values():
            if not worker.ended:
                _tree.kill_group(worker.process)
        for worker in self._workers.values():
            worker.process.wait()
        left = _tree.sweep(self._mark, [worker.process.pid for worker in self._workers.values()])
        if self._keeper is not None:
            self._keeper.close()
        self._channel.send("bye", leftovers=left)
        self._loop.until(lambda: self._channel.idle or not self._channel.open, FAREWELL)

    # --- what the supervisor says -----------------------------------------------------------------

    def _receive(self, record: Mapping[str, Any], payload: bytes) -> None:
        if self._ended or (self._lease.at is not None and time.monotonic() >= self._lease.at):
            self._ended = True  # it was stopped for so long that this comes too late
            return
        kind = record["kind"]
        worker = self._workers.get(record.get("worker", -1))
        if kind == "begin":
            self._begin(record)
        elif kind == "beat":
            sent = self._sent.pop(record["number"], None)
            if sent is not None:
                self._lease.at = sent + self._silence
        elif kind == "listen":
            self._listen(record["address"])
        elif kind == "start":
            self._start(record)
        elif kind == "end":
            self._ended = True
        elif worker is None or worker.ended:
            return
        elif kind == "signal":
            worker.process.send_signal(record["number"])
        elif kind == "kill":
            _tree.kill_group(worker.process)
        elif kind == "control":
            worker.tell(record["record"])
        elif kind == "join":
            self._join(worker, record)
        elif kind == "guard":
            worker.guard_send(record["world"], record["record"])
        elif kind == "guard-end":
            worker.guard_close(record["world"])
        elif kind == "stack":
            self._stacks.ask(worker.number)

    def _begin(self, record: Mapping[str, Any]) -> None:
        """What is run here."""
        self._silence = float(record["silence"])
        self._mark = record["mark"]
        self._lease.at = time.monotonic() + self._silence
        self._on_beat()
        try:
            if record["version"] != VERSION:
                raise LaunchError(
                    f"Hora {VERSION} is installed there, and {record['version']} here.",
                    fix="Install the same version on all hosts.",
                )
            try:
                os.chdir(record["directory"])
            except OSError as error:
                raise LaunchError(
                    f"The directory {record['directory']} cannot be entered there: {error.strerror}.",
                    fix="Start the job from a directory that all hosts have, such as a shared one.",
                ) from error
            kind = ModuleTarget if record["module"] else ScriptTarget
            job = Job(
                target=kind(record["target"]),
                arguments=record["arguments"],
                workers=record["slots"],
                env=record["env"],
                elastic=Elastic() if record["elastic"] else None,
            )
            check(job)
            run = RunDirectory(Path(record["run"]), attempt=record["attempt"])
            with disk_errors(run.path):  # where it is not shared between the hosts
                for path in (run.failure(0), run.events(0)):
                    path.parent.mkdir(parents=True, exist_ok=True)
        except HoraError as error:
            self._channel.send("refused", what=error.what, fix=error.fix)
            return
        starts: type[ElasticStarter | RankStarter] = ElasticStarter if record["elastic"] else RankStarter
        self._starter = starter = starts(job, run, self._mark)
        self._news = News(
            starter.failures,
            run,
            self._loop,
            tell=lambda worker, found: self._channel.send("raised", worker=worker, record=dict(found)),
            notice=lambda found: self._channel.send("notice", record=dict(found)),
        )
        self._loop.watch(starter.status, self._on_status)
        self._channel.send("begun")

    def _start(self, record: Mapping[str, Any]) -> None:
        number, starter = record["worker"], self._starter
        shared = (self._loop, self._channel, self._stacks)
        try:
            if isinstance(starter, RankStarter):
                world = self._enter(0, record["size"], guarded=record["guard"])
                starter.variables[number] = record["variables"]
                if record["serves"] and self._listening is not None:
                    starter.serve(self._listening)
                    self._listening = None
                begun = fixed(starter, number, world)
                worker = AgentWorker(number, begun, *shared, fresh=self._show_board)
                worker.take_part(world, record["rank"])
            else:
                assert starter is not None
                worker = AgentWorker(number, free(starter, number), *shared, fresh=self._show_board)
        except OSError as error:
            self._channel.send("failed", worker=number, why=str(error.strerror or error))
            return
        self._workers[number] = worker
        if self._keeper is None:
            pids = [worker.process.pid]
            self._keeper = Keeper(
                self._mark, pids, Path(_reaper.NOWHERE), self._loop, complain=self._complain
            )
        fd = _tree.end_descriptor(worker.process)

        def ended() -> None:
            self._loop.forget(fd)
            os.close(fd)
            code = worker.process.wait()
            self._news.read()
            worker.finish()
            self._channel.send("exit", patient=True, worker=number, code=code)

        self._loop.watch(fd, ended)
        self._channel.send("started", worker=number, pid=worker.process.pid)

    def _complain(self, text: str) -> None:
        self._channel.send("complain", text=text)

    # --- worlds -----------------------------------------------------------------------------------

    def _listen(self, address: str) -> None:
        """Keep a port for the store of a world whose rank 0 runs here: it is known before it is needed."""
        if self._listening is not None:
            self._listening.close()
        self._address = address
        try:
            self._listening = socket.create_server((address, 0), backlog=1024)
        except OSError as error:
            what = f"It cannot listen at its address {address}: {error.strerror}."
            self._channel.send("refused", what=what, fix="Choose another with --network.")
            return
        self._channel.send("port", address=address, port=self._listening.getsockname()[1])

    def _join(self, worker: AgentWorker, record: Mapping[str, Any]) -> None:
        world = self._enter(record["world"], record["size"], guarded=record["guard"])
        store = None
        if record["serves"] and self._listening is not None:
            store = self._listening
        worker.join(world, record["rank"], record["record"], store)
        if store is not None:
            self._listen(self._address)

    def _enter(self, number: int, size: int, *, guarded: bool) -> World:
        if self._world is None or self._world.number != number:
            if self._world is not None:
                self._world.close()
            self._world = World(number, size, guarded=guarded)
            self._look.at = time.monotonic() + LOOK if guarded else None
        return self._world

    def _on_look(self) -> None:
        for worker in self._workers.values():
            self._show_board(worker)
        self._look.at = time.monotonic() + LOOK

    def _show_board(self, worker: AgentWorker) -> None:
        world = self._world
        if world is not None and worker.world is world:
            copy = world.copy(worker)
            if copy is not None:
                now = time.monotonic()
                self._channel.send("board", copy, worker=worker.number, world=world.number, now=now)

    # --- what else happens ------------------------------------------------------------------------

    def _on_beat(self) -> None:
        self._beats += 1
        self._sent[self._beats] = time.monotonic()
        for old in [number for number in self._sent if number < self._beats - 4 * BEATS]:
            del self._sent[old]
        self._channel.send("beat", number=self._beats)
        self._beat.at = time.monotonic() + self._silence / BEATS

    def _on_status(self) -> None:
        assert self._starter is not None
        data = os.read(self._starter.status, STATUS_CHUNK)
        if data:
            self._channel.send("status", data, patient=True)
        else:
            self._loop.forget(self._starter.status)

    def _on_room(self) -> None:
        for worker in self._workers.values():
            worker.go_on()

    def _on_stack(self, number: int, text: str) -> None:
        children = self._workers[number].stopped_children()
        self._channel.send("stack", text.encode("utf-8", "replace"), worker=number, children=children)


def main() -> None:
    """Serve the supervisor at the other end of stdin and stdout."""
    reader, writer = os.dup(0), os.dup(1)
    # What anything here prints must not come between the messages.
    with open(os.devnull) as nothing:  # noqa: PTH123 - the descriptor alone is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.write(writer, MARK)
    try:
        Agent(reader, writer).run()
    except Exception:  # noqa: BLE001 - the last line tells the supervisor why
        traceback.print_exc()
        sys.exit(1)
