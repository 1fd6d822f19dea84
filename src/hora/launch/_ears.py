"""The supervisor of workers of which some run on other hosts: what their agents tell, and how that ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hora.launch._away import AwayProcess
from hora.launch._away_host import AwayHost
from hora.launch._ranks import Rank
from hora.launch._start import Starter
from hora.launch.failure import Outcome
from hora.launch.supervisor import Supervisor

__all__ = ["HearingSupervisor"]


class HearingSupervisor(Supervisor):
    """Takes in what agents tell (:class:`hora.launch._away_host.Ears`); see :class:`Supervisor`."""

    @abstractmethod
    def _away_hosts(self) -> Iterable[AwayHost]:
        """The other hosts that there are now."""

    @abstractmethod
    def _leave_hosts(self) -> Sequence[str]:
        """End the agents; what they had to kill."""

    def _hear(self, starter: Starter) -> None:
        super()._hear(starter)
        self._console.meanwhile(self._keep_hosts)

    def _keep_hosts(self) -> None:
        """Somebody keeps the console waiting; the agents must not take that for the end."""
        for host in list(self._away_hosts()):
            host.keep()

    def output(self, worker: int, which: int, data: bytes) -> None:
        """A worker has printed."""
        self._ranks[worker].streams.feed(which, data)

    def status(self, data: bytes) -> None:
        """Progress, as rank 0 tells it."""
        self._progress.feed(data)

    def raised(self, worker: int, record: Mapping[str, Any]) -> None:
        """A worker has failed by an exception."""
        self._news.hear(worker, dict(record))

    def notice(self, record: Mapping[str, Any]) -> None:
        """A worker tells what it has saved, and the like."""
        self._edges.notice(record)

    def complain(self, text: str) -> None:
        """Something is wrong, but goes on."""
        self._complain(text)

    def _take_outcome(self, rank: Rank) -> Outcome:
        outcome = super()._take_outcome(rank)
        if isinstance(rank.process, AwayProcess):
            outcome.host, outcome.lost = rank.process.host, rank.process.lost
        return outcome

    def _end(self) -> None:
        left = self._leave_hosts()
        if left and self._exit_code is None:
            self._console.say(f"hora: stopped what was left behind: {', '.join(left)}")
        super()._end()
