"""The supervisor of workers that are started one by one, on this host or on others, while the job runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hora.core import settings
from hora.core.rundir import RunDirectory
from hora.launch._agents import Agents
from hora.launch._away_host import AwayHost
from hora.launch._ears import HearingSupervisor
from hora.launch._elastic_hosts import Hosts
from hora.launch._elastic_story import Story
from hora.launch._elastic_workers import ElasticStarter, Worker
from hora.launch._link import Link
from hora.launch.job import HERE, Elastic, Job, rank_environment

__all__ = ["CrewSupervisor"]


class CrewSupervisor(HearingSupervisor):
    """Starts workers where there is a place; see :class:`Supervisor`."""

    def __init__(
        self, job: Job, run: RunDirectory, *, announce: bool = True, began: float | None = None
    ) -> None:
        super().__init__(job, run, announce=announce, began=began)
        assert job.elastic is not None
        self._elastic: Elastic = job.elastic
        self._chosen = settings.load(rank_environment(job))
        self._workers: dict[int, Worker] = {}
        self._story = Story(run, quiet=job.quiet, say=self._tell)
        self._refill = self._loop.timer(self._fill)
        self._hosts = Hosts(
            self._elastic, job.workers, self._loop, say=self._story.say, changed=self._on_hosts
        )
        self._agents = Agents(
            job,
            run,
            self._id,
            self._chosen,
            self._loop,
            ears=self,
            say=self._story.say,
            changed=self._on_hosts,
            gone=self._on_host_gone,
        )

    def _tell(self, text: str) -> None:
        self._console.say(text)

    @property
    @abstractmethod
    def _living(self) -> list[Worker]:
        """Those that may take part."""

    @abstractmethod
    def _wants_more(self) -> bool:
        """Whether workers may be started."""

    @abstractmethod
    def _take(self, worker: Worker, record: Mapping[str, Any]) -> None:
        """A worker says something about the worlds."""

    @abstractmethod
    def _settle(self) -> None:
        """Something has changed that may be waited for."""

    @abstractmethod
    def _on_host_gone(self, host: AwayHost, why: str, surely: float) -> None:
        """A host is lost; its workers have surely ended at this time, ``time.monotonic()``."""

    # --- start ------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._closing.append(self._hosts.close)
        with self._told_if_short():
            self._starter = ElasticStarter(self._job, self._run_directory, self._id)
            self._hear(self._starter)
            self._hosts.begin()
            self._fill()
            self._keep()

    def _begin(self, host: str, away: AwayHost | None) -> Worker:
        number = len(self._ranks)

        def take(record: Mapping[str, Any]) -> None:
            self._take(worker, record)

        if away is not None:
            remote, link = away.start(number, take)
            worker = Worker(number=number, process=remote, host=host, away=away)
            worker.link = link
        else:
            process, ours, (reader, writer) = self._starter.begin(number)
            worker = Worker(number=number, process=process, host=host, reader=reader, writer=writer)
            worker.link = Link(
                ours,
                self._loop,
                receive=take,
                complain=lambda what: self._complain(f"worker {number} {what}"),
                closed=lambda: None,
            )
        self._workers[number] = worker
        self._follow(number, worker.process)
        return worker

    def _fill(self) -> None:
        """Start workers until there are as many as are wanted, or as there are places now."""
        if not self._wants_more():
            return
        living = self._living
        self._agents.keep(
            {*self._hosts.names, *(worker.host for worker in self._workers.values() if not worker.ended)}
        )
        usable: dict[str, AwayHost | None] = {}

        def able(host: str) -> bool:
            if host not in usable:
                usable[host] = None if host == HERE else self._agents.at(host, self._hosts.slots(host))
            return host == HERE or usable[host] is not None

        leaving = self._hosts.leaving([each.host for each in living])
        taken = [each.host for index, each in enumerate(living) if index not in leaving]
        while (host := self._hosts.next_place(taken, able)) is not None:
            self._begin(host, usable[host])
            taken.append(host)
        self._refill.at = self._hosts.next_change()

    def _on_hosts(self) -> None:
        self._fill()
        self._settle()

    def _away_hosts(self) -> Iterable[AwayHost]:
        return self._agents.hosts

    def _leave_hosts(self) -> Sequence[str]:
        return self._agents.close()
