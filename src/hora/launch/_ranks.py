"""The processes of a job's ranks: who lives, and the signals they get."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass

from hora.launch import _tree
from hora.launch._streams import Streams
from hora.launch.failure import Outcome

__all__ = ["Rank", "Ranks"]


@dataclass(kw_only=True)
class Rank:
    """One process.

    Attributes:
        number: the rank, or the lasting number of an elastic job's worker.
        process: it.
        streams: what it prints.
        outcome: how it ended; None: it has not.
        stop_sent: when it was told to stop, ``time.time()``; None: never.
    """

    number: int
    process: _tree.Process
    streams: Streams
    outcome: Outcome | None = None
    stop_sent: float | None = None


class Ranks(list[Rank]):
    """All that were started, by number."""

    @property
    def living(self) -> list[Rank]:
        """Those whose end has not been noticed."""
        return [rank for rank in self if rank.outcome is None]

    @property
    def pids(self) -> list[int]:
        """Of those on this host, which are also the numbers of the process groups that they lead."""
        return [rank.process.pid for rank in self if isinstance(rank.process, subprocess.Popen)]

    def ask(self) -> None:
        """SIGTERM, which the ranks have said to take for "save at the next step edge, then stop"."""
        for rank in self._running():
            _tell(rank)

    def stop(self) -> None:
        """SIGTERM to the ranks alone: their loader workers must live until the rank has saved its state."""
        for rank in self._running():
            rank.stop_sent = time.time()
            _tell(rank)

    def kill(self) -> None:
        """SIGKILL to the ranks and all that shares their process groups. Also called by a signal handler."""
        for rank in self.living:
            rank.stop_sent = rank.stop_sent or time.time()
            _tree.kill_group(rank.process)

    def collect(self) -> None:
        """Wait for those that live: there are some only after an error in the loop itself."""
        for rank in self.living:
            rank.outcome = Outcome(
                rank=rank.number, code=rank.process.wait(), ended=time.time(), stop_sent=0.0
            )

    def _running(self) -> list[Rank]:
        """Those that have not ended by themselves, so that the event is only on its way."""
        return [rank for rank in self.living if rank.process.poll() is None]


def _tell(rank: Rank) -> None:
    rank.process.send_signal(signal.SIGTERM)
    rank.process.send_signal(signal.SIGCONT)  # one that is stopped would not see it
