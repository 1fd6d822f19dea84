"""What can be done to a job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.chaos.processes import Rank, living, tcp_ports
from hora.chaos.schedule import Disturbance
from hora.chaos.stage import Stage
from hora.core import commits

__all__ = ["Acts", "Done"]

LOOK_AGAIN = 0.05
"""Seconds between two looks for new connections of a rank that is cut off; nothing tells of them."""

HOLD = 20.0
"""Seconds at most that a disk stays full until a save has met it."""


@dataclass(kw_only=True)
class Done:
    """A disturbance that took place.

    Attributes:
        one: what was asked for.
        time: ``time.time()`` of it.
        step: steps that the training had made.
        what: what was done, to whom, in words.
        pid: of the rank; None: it was not done to one.
        wrong: what turned out wrong at once, in words.
        over: ``time.time()`` of its end, where it has one.
        failed_saves: verdicts about checkpoints that could not be written, while it lasted.
    """

    one: Disturbance
    time: float
    step: int
    what: str
    pid: int | None = None
    wrong: list[str] = field(default_factory=list)
    over: float | None = None
    failed_saves: int = 0

    def line(self, began: float) -> str:
        """What is said when it happens."""
        return f"  {self.time - began:7.2f} s  step {self.step}: {self.what}"

    def told(self) -> dict[str, Any]:
        """For ``chaos.json``."""
        return {
            "kind": self.one.kind,
            "moment": self.one.moment,
            "drawn": self.one.when,
            "time": self.time,
            "step": self.step,
            "what": self.what,
            "pid": self.pid,
            "until": self.over,
        }


class Acts:
    """Performs disturbances on one job.

    Args:
        stage: where it runs.
        mark: of its processes.
        at: calls something after so many seconds.
    """

    def __init__(self, stage: Stage, mark: str, *, at: Callable[[float, Callable[[], None]], None]) -> None:
        self._stage, self._mark, self._at = stage, mark, at
        self._held: list[Rank] = []
        self._cuts = 0
        self._full: list[tuple[Done, commits.Place | None]] = []

    def perform(self, one: Disturbance, *, step: int, ranks: Mapping[int, int]) -> Done | None:
        """Do it; None: there is no rank, or no checkpoint, to do it to now."""
        if one.kind == "fill-disk":
            return self._fill(one, step)
        rank = self._choose(one.choice)
        if rank is None:
            return None
        who = _name(rank, ranks.get(rank.pid))
        done = Done(one=one, time=time.time(), step=step, what="", pid=rank.pid)
        if one.kind == "corrupt-checkpoint":
            spoilt = spoil(self._stage.folder / "checkpoints", one.choice)
            if spoilt is None:
                return None
            done.what = f"{spoilt}, and {who} is killed"
            rank.signal(signal.SIGKILL)
        elif one.kind == "kill":
            done.what = f"{who} is killed"
            rank.signal(signal.SIGKILL)
        elif one.kind == "stop":
            done.what = f"{who} is stopped for good"
            rank.signal(signal.SIGSTOP)
        elif one.kind == "delay":
            done.what = f"{who} is stopped for {one.lasts:.1f} s"
            rank.signal(signal.SIGSTOP)
            self._at(one.lasts, lambda: self._go_on(rank, done))
        else:
            self._cut(rank, done, who)
        return done

    def close(self) -> None:
        """The job has ended."""
        for rank in self._held:
            rank.close()
        for done, _ in self._full:
            done.wrong.append("the disk was full until the job had ended")

    def _choose(self, choice: float) -> Rank | None:
        ranks = living(self._stage.process.pid, self._mark)
        self._held += ranks
        return ranks[int(choice * len(ranks))] if ranks else None

    def _go_on(self, rank: Rank, done: Done) -> None:
        rank.signal(signal.SIGCONT)
        done.over = time.time()

    # --- the network ----------------------------------------------------------------------------

    def _cut(self, rank: Rank, done: Done, who: str) -> None:
        ports = tcp_ports(rank.pid)
        done.what = f"the {len(ports)} TCP ports of {who} are cut off for {done.one.lasts:.1f} s"
        if not ports:
            done.what = f"{who} has no TCP connection that could be cut"
        self._stage.cut(ports)
        self._cuts += 1
        until = done.time + done.one.lasts

        def look() -> None:
            if time.time() < until:
                self._stage.cut(tcp_ports(rank.pid))
                self._at(min(LOOK_AGAIN, max(0.0, until - time.time())), look)
                return
            done.over = time.time()
            self._cuts -= 1
            if not self._cuts:
                self._stage.heal()

        self._at(LOOK_AGAIN, look)

    # --- the disk -------------------------------------------------------------------------------

    def _fill(self, one: Disturbance, step: int) -> Done:
        checkpoints = self._stage.folder / "checkpoints"
        good = newest(checkpoints)
        began = time.time()
        size = self._stage.fill()
        done = Done(one=one, time=began, step=step, what=f"the disk is filled with {size / 2**20:.0f} MB")
        self._full.append((done, good))
        failed = _failed_saves(self._stage.folder, self._stage.output)

        def look() -> None:
            lasted = time.time() - began
            done.failed_saves = _failed_saves(self._stage.folder, self._stage.output) - failed
            met = done.failed_saves > 0 or one.moment != "save"
            if lasted < one.lasts or (not met and lasted < HOLD):
                self._at(LOOK_AGAIN, look)
                return
            if good is not None and newest(checkpoints, at_most=good) != good:
                done.wrong.append(
                    f"checkpoint {good.path.name} was whole before the disk was full, and is not"
                )
            self._full.remove((done, good))
            self._stage.empty()
            done.over = time.time()

        self._at(min(one.lasts, LOOK_AGAIN), look)
        return done


def _name(rank: Rank, number: int | None) -> str:
    """A rank in words; ``number`` is what it was in its last step, if it has made one."""
    if not rank.elastic:
        return f"rank {rank.worker} (pid {rank.pid})"
    return (
        f"worker {rank.worker} ({'not a rank yet' if number is None else f'rank {number}'}, pid {rank.pid})"
    )


def newest(
    directory: Path, *, at_most: commits.Place | None = None, before: commits.Place | None = None
) -> commits.Place | None:
    """The newest checkpoint of a directory that is whole, up to one or before one."""
    for place in commits.places(directory):
        if (at_most is not None and place > at_most) or (before is not None and place >= before):
            continue
        try:
            if commits.problem_of(place.path, commits.read(place)) is None:
                return place
        except (commits.DamagedError, OSError):  # not whole, or removed in this moment
            continue
    return None


def spoil(directory: Path, choice: float) -> str | None:
    """Damage the newest checkpoint that is whole; what was done, or None: there is no older one.

    Args:
        directory: of checkpoints.
        choice: in [0, 1): how, and where.
    """
    place = newest(directory)
    if place is None or newest(directory, before=place) is None:
        return None
    files = sorted(commits.read(place).files)
    drawn = int(choice * 2**40)
    file = place.path / files[drawn % len(files)]
    name, size = f"{file.name} of checkpoint {place.path.name}", file.stat().st_size
    how = (drawn // 64) % 3
    if how == 0 or size == 0:
        file.unlink()
        return f"{name} is removed"
    if how == 1:
        with file.open("r+b") as data:
            data.truncate(drawn % size)
        return f"{name} is truncated from {size} to {drawn % size} bytes"
    with file.open("r+b") as data:
        at = drawn % size
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ (1 << drawn // 192 % 8)]))
    return f"a bit of {name} is flipped"


def _failed_saves(run: Path, output: Path) -> int:
    """How often it was told; on a full disk the console has it, and the run directory may not."""
    verdicts = run / "verdicts.jsonl"
    written = verdicts.read_text(errors="replace").count('"checkpoint-failed"') if verdicts.exists() else 0
    return max(written, output.read_text(errors="replace").count("hora explain checkpoint-failed"))
