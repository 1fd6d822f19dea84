"""The supervisor of a job whose workers are spread over hosts, so many on each, and stay where they are."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterable, Sequence

from hora.core import settings
from hora.core.errors import LaunchError
from hora.core.rundir import RunDirectory
from hora.launch._away_host import START, AwayHost
from hora.launch._ears import HearingSupervisor
from hora.launch._elastic_workers import addresses_of, engine_variables, places_of
from hora.launch._guard import Guard
from hora.launch._network import Address
from hora.launch._start import RankStarter, free_port
from hora.launch.job import HERE, HOST, Job, rank_environment

__all__ = ["SpreadSupervisor"]

FAREWELL = 5.0
"""Seconds that the agents get to clear up when the job has ended."""


class SpreadSupervisor(HearingSupervisor):
    """Runs one job on several hosts; see :class:`Supervisor`."""

    def __init__(
        self, job: Job, run: RunDirectory, *, announce: bool = True, began: float | None = None
    ) -> None:
        super().__init__(job, run, announce=announce, began=began)
        self._names = [name for name, count in job.hosts for _ in range(count)]
        self._hosts: dict[str, AwayHost] = {}
        self._problem: tuple[str, str] | None = None

    def _make_guard(self) -> Guard:
        hosts = [socket.gethostname() if name == HERE else name for name in self._names]
        return self._guard_of(self._job, hosts=hosts)

    def _start(self) -> None:
        self._reach_hosts()
        addresses = addresses_of(
            {name: self._hosts.get(name) for name in dict.fromkeys(self._names)},
        )
        first = self._names[0]
        address = addresses[first].address if addresses else HOST
        with contextlib.ExitStack() as stack, self._told_if_short():
            starter = RankStarter(self._job, self._run_directory, self._id)
            self._hear(starter)
            if first == HERE:
                store = stack.enter_context(socket.create_server((address, 0), backlog=1024))
                starter.serve(store)
                port, other = store.getsockname()[1], free_port()
            else:
                port, other = self._hosts[first].take_port(), self._hosts[first].spare_port
            for number, place in enumerate(places_of(self._names)):
                name = self._names[number]
                variables = _variables(place, address, port, other, addresses.get(name))
                if name == HERE:
                    starter.variables[number] = variables
                    self._start_rank(starter, number)
                else:
                    self._start_away(self._hosts[name], number, variables)
            self._keep()
        starter.started()
        self._guard.all_started()

    def _reach_hosts(self) -> None:
        """Start the agents, and wait until each is ready."""
        chosen = settings.load(rank_environment(self._job))
        for index, (name, count) in enumerate(self._job.hosts):
            if name == HERE:
                continue
            try:
                self._hosts[name] = AwayHost(
                    name,
                    index,
                    self._job,
                    self._run_directory,
                    self._id,
                    slots=count,
                    chosen=chosen,
                    loop=self._loop,
                    ears=self,
                    begun=lambda host: None,
                    gone=self._on_gone,
                )
            except OSError as error:
                self._problem = name, f"the remote shell {error.filename} cannot be started: {error.strerror}"

        def done() -> bool:
            ready = all(host.ready and host.port is not None for host in self._hosts.values())
            return ready or self._problem is not None or self._signals.pending

        self._loop.until(done, START)
        if self._signals.pending:
            raise KeyboardInterrupt
        if self._problem is not None:
            name, why = self._problem
            raise LaunchError(
                f"The host {name} cannot be used: {why}.".replace("..", "."),
                fix="Correct that, or leave the host out of --hosts.",
            )

    def _start_away(self, host: AwayHost, number: int, variables: dict[str, str]) -> None:
        process, _ = host.start(
            number,
            lambda record: None,
            variables=variables,
            rank=number,
            size=len(self._names),
            guard=self._guard.watches,
            serves=number == 0,
        )
        self._follow(number, process)
        if self._guard.watches:
            self._guard.admit_away(number, host.seat(0, number))

    def _on_gone(self, host: AwayHost, why: str, surely: float) -> None:
        self._problem = self._problem or (host.name, why)

    def _away_hosts(self) -> Iterable[AwayHost]:
        return self._hosts.values()

    def _leave_hosts(self) -> Sequence[str]:
        deadline = time.monotonic() + FAREWELL
        for host in self._hosts.values():
            host.end()
        left = [host.close(max(0.0, deadline - time.monotonic())) for host in self._hosts.values()]
        return list(itertools.chain.from_iterable(left))


def _variables(
    place: dict[str, int], address: str, port: int, other: int, own: Address | None
) -> dict[str, str]:
    """What tells a rank its place, and where to meet the others."""
    found = {f"HORA_{name.upper()}": str(value) for name, value in place.items()}
    names = {
        "RANK": "rank",
        "WORLD_SIZE": "size",
        "LOCAL_RANK": "local_rank",
        "LOCAL_WORLD_SIZE": "local_size",
        "GROUP_RANK": "host_index",
        "GROUP_WORLD_SIZE": "host_count",
    }
    found |= {theirs: str(place[ours]) for theirs, ours in names.items()}
    found |= {"HORA_STORE": f"tcp://{address}:{port}", "MASTER_ADDR": address, "MASTER_PORT": str(other)}
    if own is not None and place["host_count"] > 1:
        found |= engine_variables(own)
    return found
