"""The workers and the worlds of an elastic job, as the supervisor knows them."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hora.launch import horovod
from hora.launch._away import AwayLink
from hora.launch._away_host import AwayHost
from hora.launch._guard import Ends, Guard
from hora.launch._link import Link
from hora.launch._network import Address
from hora.launch._start import Starter
from hora.launch._tree import Process
from hora.launch.failure import Outcome
from hora.launch.job import HOST

__all__ = [
    "ElasticStarter",
    "Worker",
    "World",
    "addresses_of",
    "in_order",
    "last_ends",
    "may_go",
    "places_of",
]


@dataclass(kw_only=True, eq=False)
class Worker:
    """One process.

    Attributes:
        number: the worker's, which lasts.
        process: it.
        host: where it runs.
        link: to its half of :mod:`hora.core.elastic`.
        reader: of the pipe on which it writes its stack.
        writer: the number of that pipe's other end in the process.
        away: the host, if it is another one; the pipe is there then.
        ready: whether it waits for the next world.
        prepared: whether it has made its model and its state.
        alone: whether it was told to make them by itself.
        commits: commits that its state has seen.
        repeats: steps that it makes anew since the last commit.
        raised: whether it has said that it ends by an exception.
        well: whether its script has come to its end.
        dismissed: whether it was stopped because it is not needed.
        ended: whether the process has ended.
    """

    number: int
    process: Process
    host: str
    reader: int = -1
    writer: int = -1
    away: AwayHost | None = None
    link: Link | AwayLink = field(init=False)
    ready: bool = False
    prepared: bool = False
    alone: bool = False
    commits: int = 0
    repeats: int = 0
    raised: bool = False
    well: bool = False
    dismissed: bool = False
    ended: bool = False

    @property
    def lost(self) -> bool:
        """Whether its host is lost."""
        return self.away is not None and not self.away.ready

    def answer(self, record: Mapping[str, Any], descriptors: Mapping[str, int] | None = None) -> None:
        """Tell a worker that is ready what to do."""
        self.ready = False
        if isinstance(self.link, AwayLink):
            self.link.send({**record, "opens": []})
            return
        opens = descriptors or {}
        self.link.send({**record, "opens": list(opens)}, list(opens.values()))

    def close(self) -> None:
        """It has ended."""
        self.ended, self.ready = True, False
        self.link.close()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


@dataclass(kw_only=True, eq=False)
class World:
    """Which workers take part, by rank.

    Attributes:
        number: of the world, from 0.
        members: its workers; a worker's place in the list is its rank.
        running: whether one of them has come to the training itself.
        broken: why it ended before its time.
        leaving: whether a member has left it to form the next.
        done: members that have come to the training's end.
        finished: whether all have.
    """

    number: int
    members: list[Worker]
    running: bool = False
    broken: str | None = None
    leaving: bool = False
    done: set[int] = field(default_factory=set)
    finished: bool = False

    @property
    def closing(self) -> bool:
        """Whether its members are on their way to the next world."""
        return self.broken is not None or self.leaving

    @property
    def living(self) -> list[Worker]:
        """Members whose process has not ended."""
        return [worker for worker in self.members if not worker.ended]

    def at(self, ranks: Sequence[int]) -> list[Worker]:
        """The members of these ranks."""
        return [self.members[rank] for rank in ranks if rank < len(self.members)]

    def send(self, kind: str, **details: Any) -> None:
        """Tell all members that live."""
        for worker in self.living:
            worker.link.send({"kind": kind, "number": self.number, **details})

    def begin(self, guard: Guard) -> None:
        """Tell the members, each with its ends of what belongs to this world."""
        size = len(self.members)
        places = places_of([worker.host for worker in self.members])
        addresses = addresses_of({worker.host: worker.away for worker in self.members})
        first = self.members[0]
        address = addresses[first.host].address if addresses else HOST
        with contextlib.ExitStack() as stack:
            store = None
            if first.away is None:
                store = stack.enter_context(socket.create_server((address, 0), backlog=max(128, 2 * size)))
                port = store.getsockname()[1]
            else:
                port = first.away.take_port()
            for rank, (worker, place) in enumerate(zip(self.members, places, strict=True)):
                record = {
                    "kind": "world",
                    "number": self.number,
                    "place": place,
                    "store": f"tcp://{address}:{port}",
                    "environment": engine_variables(addresses[worker.host]) if len(addresses) > 1 else {},
                }
                if worker.away is None:
                    _begin_here(guard, rank, worker, record, store if rank == 0 else None)
                else:
                    if guard.watches:
                        guard.admit_away(rank, worker.away.seat(self.number, worker.number))
                    worker.ready = False
                    worker.away.join(
                        self.number, worker.number, record, rank=rank, size=size, guard=guard.watches
                    )
        guard.all_started()


def _begin_here(
    guard: Guard, rank: int, worker: Worker, record: Mapping[str, Any], store: socket.socket | None
) -> None:
    assert isinstance(worker.process, subprocess.Popen)
    reader = os.dup(worker.reader)
    ends = guard.admit(rank, worker.process, reader=reader, writer=worker.writer)
    opens = {} if ends is None else {"guard_fd": ends[0].fileno(), "guard_board": ends[1]}
    if store is not None:
        opens["store_fd"] = store.fileno()
    worker.answer(record, opens)
    if ends is not None:
        ends[0].close()


def addresses_of(hosts: Mapping[str, AwayHost | None]) -> dict[str, Address]:
    """Where each host is reached by the others; nothing where there is one host, and that this one.

    Args:
        hosts: by their names; None: this host.
    """
    away = [host for host in hosts.values() if host is not None]
    found = {host.name: host.address for host in away if host.address is not None}
    here = [name for name, host in hosts.items() if host is None]
    if here and found:
        peer = next((host.peer for host in away if host.peer is not None), None)
        found[here[0]] = peer or Address("lo", HOST, 8)
    return found


def places_of(hosts: Sequence[str]) -> list[dict[str, int]]:
    """The place of each rank, by the ranks' hosts: the fields of :class:`hora.core.world.World`."""
    counts = collections.Counter(hosts)
    order = list(counts)  # that of their first ranks
    before: collections.Counter[str] = collections.Counter()
    places = []
    for rank, host in enumerate(hosts):
        places.append(
            {
                "rank": rank,
                "size": len(hosts),
                "local_rank": before[host],
                "local_size": counts[host],
                "host_index": order.index(host),
                "host_count": len(order),
            }
        )
        before[host] += 1
    return places


def engine_variables(address: Address) -> dict[str, str]:
    """What the engines need to use the right network."""
    return {"GLOO_SOCKET_IFNAME": address.interface, "NCCL_SOCKET_IFNAME": address.interface}


def in_order(workers: Sequence[Worker], before: Sequence[Worker]) -> list[Worker]:
    """Workers by their ranks in the next world.

    The one that has seen the most commits comes first, since rank 0 gives its state to the others. Else those
    of the world before keep their order, and new ones come last.
    """
    chosen = [worker for worker in before if worker in workers]
    chosen += [worker for worker in workers if worker not in chosen]
    return sorted(chosen, key=lambda worker: -worker.commits)


def may_go(workers: Sequence[Worker], leaving: Sequence[int]) -> list[int]:
    """Which of those that leave can do so now: if all who have what was committed leave, one of them stays.

    Args:
        workers: of a world, or of the next.
        leaving: numbers in that list.
    """
    most = max((worker.commits for worker in workers), default=0)
    holders = [index for index, worker in enumerate(workers) if worker.commits == most]
    stays = holders[:1] if most and set(holders) <= set(leaving) else []
    return [index for index in leaving if index not in stays]


def last_ends(
    world: World | None, members: Sequence[Worker], ends: Sequence[Outcome | None]
) -> list[Outcome]:
    """The ends that tell how the job ended, by rank.

    Args:
        world: the last one.
        members: its workers, or all where there was none.
        ends: how each worker has ended, by its number.
    """
    found = []
    for rank, worker in enumerate(members):
        outcome = ends[worker.number]
        if outcome is not None:
            found.append(replace(outcome, rank=rank, log=worker.number))
    if world is not None and world.finished and found and not found[0].failed:
        # The training is complete; who was killed after it is left out.
        found = [outcome for outcome in found if outcome.record is not None or outcome.code >= 0]
    return found


class ElasticStarter(Starter):
    """Starts the workers of an elastic job; it may be asked for more at any time."""

    def begin(self, number: int) -> tuple[subprocess.Popen[bytes], socket.socket, tuple[int, int]]:
        """Start one worker.

        Returns:
            The process, the supervisor's end of its control socket, and the two ends of the pipe for its
            stack: the one that reads, and the number of the other in the process.
        """
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        ends = Ends(
            environment={"HORA_ELASTIC_FD": str(theirs.fileno())},
            inherited=(theirs.fileno(), writer),
            stack=writer,
        )
        try:
            process = self.start(number, ends)
        except BaseException:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        return process, ours, (reader, writer)

    def _of_rank(self, number: int) -> tuple[list[int], dict[str, str]]:
        # Which rank it will be nobody knows yet; any may become rank 0, which shows the progress.
        environment = {
            "HORA_WORKER": str(number),
            "HORA_RANK": str(number),
            "HORA_LOCAL_RANK": str(number),
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "HORA_STATUS_FD": str(self._status_writer),
            # What torch's C++ says about lost connections comes with a stack each time.
            "TORCH_CPP_LOG_LEVEL": self._environment.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        if self._environment.get("HORA_HOROVOD") == "1":
            environment |= horovod.rank_variables(number, self._job.workers)
        return [self._status_writer], environment
