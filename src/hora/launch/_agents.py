"""The other hosts of a job: an agent on each that is needed, started again when it was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from hora.core.rundir import RunDirectory
from hora.core.settings import Settings
from hora.launch._away_host import AwayHost, Ears
from hora.launch._loop import Loop
from hora.launch.job import Job

__all__ = ["Agents"]

PAUSE, LONGEST_PAUSE = 0.5, 4.0
"""Seconds until a host that could not be reached is tried again: at first, and later at most."""

FAREWELL = 5.0
"""Seconds that the agents get to clear up when the job has ended."""


class Agents:
    """Starts agents, and tells when hosts come and go.

    Args:
        job: what is run.
        run: its run directory.
        job_id: the mark of its processes.
        chosen: the settings.
        loop: of the supervisor.
        ears: hears of the workers there.
        say: shows a text on the console.
        changed: called when workers can be started on a host, or it is worth to ask again.
        gone: called when a host that was ready is lost, with why, and when its workers have surely ended.

    Attributes:
        problems: why hosts cannot be used now, by their names.
    """

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        job_id: str,
        chosen: Settings,
        loop: Loop,
        *,
        ears: Ears,
        say: Callable[[str], None],
        changed: Callable[[], None],
        gone: Callable[[AwayHost, str, float], None],
    ) -> None:
        self.problems: dict[str, str] = {}
        self._job, self._run, self._id, self._chosen, self._loop = job, run, job_id, chosen, loop
        self._ears, self._say, self._changed, self._gone = ears, say, changed, gone
        self._hosts: dict[str, AwayHost] = {}
        self._retired: list[AwayHost] = []
        self._started = 0
        self._failures: dict[str, int] = {}
        self._again: dict[str, float] = {}
        self._retry = loop.timer(self._on_retry)

    @property
    def hosts(self) -> list[AwayHost]:
        """Those that have an agent, or get one."""
        return list(self._hosts.values())

    @property
    def pending(self) -> bool:
        """Whether an agent is being started of which it is not known yet whether it can be."""
        return any(not host.ready and name not in self._failures for name, host in self._hosts.items())

    def at(self, name: str, slots: int) -> AwayHost | None:
        """This host; None: workers cannot be started on it now. An agent is started there, if that is due."""
        host = self._hosts.get(name)
        if host is not None:
            return host if host.ready else None
        if time.monotonic() < self._again.get(name, 0.0):
            return None
        self._started += 1
        try:
            self._hosts[name] = AwayHost(
                name,
                self._started,
                self._job,
                self._run,
                self._id,
                slots=slots,
                chosen=self._chosen,
                loop=self._loop,
                ears=self._ears,
                begun=self._on_begun,
                gone=self._on_gone,
            )
        except OSError as error:
            self._fail(name, f"the remote shell {error.filename} cannot be started: {error.strerror}")
        return None

    def keep(self, names: Collection[str]) -> None:
        """These hosts are needed; agents on others end."""
        for name in [name for name in self._hosts if name not in names]:
            host = self._hosts.pop(name)
            host.end()
            self._retired.append(host)
        for name in [name for name in self.problems if name not in names]:
            del self.problems[name]
            del self._failures[name], self._again[name]

    def close(self) -> Sequence[str]:
        """The job has ended; what the agents had to kill."""
        self._retry.at = None
        left: list[str] = []
        deadline = time.monotonic() + FAREWELL
        hosts = [*self._hosts.values(), *self._retired]
        for host in hosts:
            host.end()
        for host in hosts:
            left += host.close(max(0.0, deadline - time.monotonic()))
        self._hosts.clear()
        return left

    def _on_begun(self, host: AwayHost) -> None:
        self._failures.pop(host.name, None)
        if self.problems.pop(host.name, None) is not None:
            self._say(f"host {host.name} is there again")
        self._changed()

    def _on_gone(self, host: AwayHost, why: str, surely: float) -> None:
        was_ready = host.began
        del self._hosts[host.name]
        if was_ready:
            self.problems[host.name] = why  # whoever hears of it says so
        self._fail(host.name, why)
        if was_ready:
            self._gone(host, why, surely)
        else:
            self._changed()

    def _fail(self, name: str, why: str) -> None:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        pause = min(LONGEST_PAUSE, PAUSE * 2 ** (failures - 1))
        self._again[name] = time.monotonic() + pause
        self._retry.by(self._again[name])
        if name not in self.problems:
            self._say(f"host {name} is not used now, and tried again every few seconds: {why}")
        self.problems[name] = why

    def _on_retry(self) -> None:
        self._changed()
        later = [at for at in self._again.values() if at > time.monotonic()]
        if later:
            self._retry.by(min(later))
