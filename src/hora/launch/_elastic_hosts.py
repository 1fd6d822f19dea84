"""Where the workers of an elastic job may run: the hosts, their slots, and those that rest after failures."""

from __future__ import annotations

import collections
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from hora.core.errors import LaunchError
from hora.launch._loop import Loop
from hora.launch._remote_shell import is_host
from hora.launch.job import HERE, Elastic, program_of

__all__ = ["Hosts"]

EVERY = 1.0
"""Seconds between two questions to the program that names the hosts."""

LONGEST = 10.0
"""Seconds that one answer may take."""

FREE_FAILURES = 1
"""Failures of a host, without a commit in between, after which it does not rest yet."""


class Hosts:
    """Knows how many workers each host may have now.

    Args:
        elastic: what the user asked for.
        workers: wanted at the start, on this host, where no program names hosts.
        loop: of the supervisor.
        say: shows a text on the console.
        changed: called when there may be more or fewer places than before.
    """

    def __init__(
        self,
        elastic: Elastic,
        workers: int,
        loop: Loop,
        *,
        say: Callable[[str], None],
        changed: Callable[[], None],
        seed: int = 0,
    ) -> None:
        self._elastic = elastic
        self._loop = loop
        self._say = say
        self._changed = changed
        self._slots: dict[str, int] = {HERE: workers} if elastic.hosts_from is None else {}
        self._failures: collections.Counter[str] = collections.Counter()
        self._resting: dict[str, float] = {}
        self._random = random.Random(seed)
        self._asked: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._said: set[str] = set()
        self._poll = loop.timer(self._ask)

    def begin(self) -> None:
        """Ask for hosts from now on."""
        if self._elastic.hosts_from is not None:
            self._ask()

    def next_place(self, taken: Sequence[str], able: Callable[[str], bool]) -> str | None:
        """A host that may get one more worker now; None: there is none, or there are enough workers.

        Args:
            taken: host of each worker.
            able: whether workers can be started on a host now; asked of those that have a place.
        """
        if len(taken) >= self._elastic.most:
            return None
        now, used = time.monotonic(), collections.Counter(taken)
        for host, slots in self._slots.items():
            if used[host] < slots and self._resting.get(host, 0.0) <= now and able(host):
                return host
        return None

    @property
    def names(self) -> list[str]:
        """Of the hosts that may have workers."""
        return [host for host, slots in self._slots.items() if slots]

    def slots(self, host: str) -> int:
        """How many workers a host may have."""
        return self._slots.get(host, 0)

    def next_change(self) -> float | None:
        """When a host that rests may get workers again, ``time.monotonic()``."""
        now = time.monotonic()
        return min((at for at in self._resting.values() if at > now), default=None)

    def leaving(self, taken: Sequence[str]) -> list[int]:
        """Which of the workers at these hosts have no place any more, by their numbers in the list."""
        used: collections.Counter[str] = collections.Counter()
        found = []
        for index, host in enumerate(taken):
            used[host] += 1
            if used[host] > self._slots.get(host, 0):
                found.append(index)
        return found

    def failed(self, host: str) -> None:
        """A worker of this host has failed: one that does so again and again rests, longer each time."""
        self._failures[host] += 1
        beyond = self._failures[host] - FREE_FAILURES
        if beyond > 0:
            shortest, longest = self._elastic.cooldown
            # Up to half more, so that hosts which failed together do not come back together.
            seconds = min(longest, shortest * 2 ** (beyond - 1)) * (1 + self._random.random() / 2)
            self._resting[host] = time.monotonic() + seconds

    def well(self) -> None:
        """The job makes progress: no host is at fault."""
        self._failures.clear()
        if self._resting:
            self._resting.clear()
            self._changed()

    def close(self) -> None:
        """Ask no more."""
        self._poll.at = None
        if self._asked is not None:
            self._asked.kill()
            self._hear_end()

    # --- the program that names hosts -------------------------------------------------------------

    def _ask(self) -> None:
        self._poll.at = time.monotonic() + (LONGEST if self._asked is None else EVERY)
        if self._asked is not None:  # it has taken too long
            self._asked.kill()
            return
        script = self._elastic.hosts_from
        assert script is not None
        try:
            self._asked = subprocess.Popen(
                program_of(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
        except (OSError, LaunchError) as error:
            self._once(f"--hosts-from: {error}; the hosts stay as they were")
            self._poll.at = time.monotonic() + EVERY
            return
        assert self._asked.stdout is not None
        self._answer = b""
        fd = self._asked.stdout.fileno()
        os.set_blocking(fd, False)
        self._loop.watch(fd, self._read)

    def _read(self) -> None:
        assert self._asked is not None
        assert self._asked.stdout is not None
        try:
            data = os.read(self._asked.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if data:
            self._answer += data
            return
        code = self._hear_end()
        self._poll.at = time.monotonic() + EVERY
        if code != 0:
            how = f"ended with exit code {code}"
            if code == -signal.SIGKILL:
                how = f"did not end within {LONGEST:g} s, or was killed"
            self._once(f"--hosts-from: the program {how}; the hosts stay as they were")
            return
        slots = self._parse(self._answer.decode("utf-8", "replace"))
        if slots != self._slots:
            self._slots = slots
            self._changed()

    def _hear_end(self) -> int:
        process, self._asked = self._asked, None
        assert process is not None
        assert process.stdout is not None
        self._loop.forget(process.stdout.fileno())
        process.stdout.close()
        return process.wait()

    def _parse(self, text: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in text.split("\n"):
            entry = line.partition("#")[0].strip()
            host, _, slots = entry.partition(":")
            if not entry:
                continue
            if not is_host(host) or (slots and not slots.isdecimal()):
                self._once(
                    f"--hosts-from: {line.strip()!r} is not of the form host:slots, and is passed over"
                )
            elif host in (HERE, "127.0.0.1", socket.gethostname()):
                found[HERE] = found.get(HERE, 0) + int(slots or 1)
            else:
                found[host] = found.get(host, 0) + int(slots or 1)
        return found

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
