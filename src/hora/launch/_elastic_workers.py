"""The workers and the worlds of an elastic job, as the supervisor knows them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hora.launch import horovod
from hora.launch._guard import Ends, Guard
from hora.launch._link import Link
from hora.launch._start import Starter
from hora.launch.failure import Outcome
from hora.launch.job import HOST

__all__ = ["ElasticStarter", "Worker", "World", "in_order", "last_ends"]


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
    process: subprocess.Popen[bytes]
    host: str
    reader: int
    writer: int
    link: Link = field(init=False)
    ready: bool = False
    prepared: bool = False
    alone: bool = False
    commits: int = 0
    repeats: int = 0
    raised: bool = False
    well: bool = False
    dismissed: bool = False
    ended: bool = False

    def answer(self, record: Mapping[str, Any], descriptors: Mapping[str, int] | None = None) -> None:
        """Tell a worker that is ready what to do."""
        self.ready = False
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
        size = str(len(self.members))
        with socket.create_server((HOST, 0), backlog=max(128, 2 * len(self.members))) as store:
            for rank, worker in enumerate(self.members):
                reader = os.dup(worker.reader)
                ends = guard.admit(rank, worker.process, reader=reader, writer=worker.writer)
                opens = {} if ends is None else {"guard_fd": ends[0].fileno(), "guard_board": ends[1]}
                if rank == 0:
                    opens["store_fd"] = store.fileno()
                place = {
                    "rank": rank,
                    "size": int(size),
                    "local_rank": rank,
                    "local_size": int(size),
                    "host_index": 0,
                    "host_count": 1,
                }
                address = f"tcp://{HOST}:{store.getsockname()[1]}"
                worker.answer(
                    {"kind": "world", "number": self.number, "place": place, "store": address}, opens
                )
                if ends is not None:
                    ends[0].close()
        guard.all_started()


def in_order(workers: Sequence[Worker], before: Sequence[Worker]) -> list[Worker]:
    """Workers by their ranks in the next world.

    The one that has seen the most commits comes first, since rank 0 gives its state to the others. Else those
    of the world before keep their order, and new ones come last.
    """
    chosen = [worker for worker in before if worker in workers]
    chosen += [worker for worker in workers if worker not in chosen]
    return sorted(chosen, key=lambda worker: -worker.commits)


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
