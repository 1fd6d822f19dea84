"""The supervisor of an elastic job: workers that die are replaced or left out, and the others go on.

A worker that dies breaks its world. The others are told at once, leave it, and as soon as each has said that
it is ready they form the next one. Who is started in the place of a dead worker makes its model and its state
by itself meanwhile, and is taken in when the others commit.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hora.core.plural import plural
from hora.core.rundir import RunDirectory
from hora.guard.verdict import Verdict
from hora.launch import _report, _tree
from hora.launch._away_host import AwayHost
from hora.launch._crew import CrewSupervisor
from hora.launch._elastic_limits import Limits
from hora.launch._elastic_workers import Worker, World, in_order, last_ends, may_go
from hora.launch._ranks import Rank
from hora.launch.failure import Outcome
from hora.launch.job import Job
from hora.launch.supervisor import AFTER_FAILURE, ON_ITS_WAY_OUT

__all__ = ["ElasticSupervisor"]

SURVIVORS_FIRST = 1.5
"""Seconds after which a dead worker's replacement is started, if the others do not commit before: it would
take processors from them while they find each other."""

NOT_ENOUGH = 1
"""Exit code of a job that was given up."""


class ElasticSupervisor(CrewSupervisor):
    """Runs one elastic job; see :class:`Supervisor`."""

    def __init__(
        self, job: Job, run: RunDirectory, *, announce: bool = True, began: float | None = None
    ) -> None:
        super().__init__(job, run, announce=announce, began=began)
        self._world: World | None = None
        self._worlds = 0
        self._patience = min(self._chosen.timeout, self._chosen.stall_abort or self._chosen.timeout)
        self._limits = Limits(self._elastic.resets)
        self._ending = False
        self._fatal: Outcome | None = None
        self._enough = self._loop.timer(self._on_not_enough)
        self._gather = self._loop.timer(self._on_not_gathered)
        self._hurry = self._loop.timer(self._kill_raised)
        self._surely = self._loop.timer(self._settle)

    # --- start ----------------------------------------------------------------------------------

    def _start(self) -> None:
        super()._start()
        self._wait_for_enough()

    def _wants_more(self) -> bool:
        return not (self._stopping or self._ending or self._asked_by is not None)

    @property
    def _living(self) -> list[Worker]:
        """Those that may take part."""
        found = self._workers.values()
        return [each for each in found if not (each.ended or each.dismissed or each.raised)]

    @property
    def _stopping(self) -> bool:
        return self._exit_code is not None or self._failing

    def _able(self) -> bool:
        """Whether there is a training that commits."""
        return self._world is not None and self._world.running and not self._ending

    def _ask(self) -> None:
        """By the supervisor's word, not a signal: it reaches a worker between two worlds as well."""
        for worker in self._living:
            worker.link.send({"kind": "stop"})

    def _goes_on(self) -> bool:
        return super()._goes_on() or not (self._stopping or self._ending)

    # --- what workers say -----------------------------------------------------------------------

    def _take(self, worker: Worker, record: Mapping[str, Any]) -> None:
        kind, world = record.get("kind"), self._world
        inside = world is not None and worker in world.members
        if kind == "ready":
            worker.ready, worker.prepared = True, bool(record.get("prepared"))
            worker.commits, worker.repeats = int(record.get("commits", 0)), int(record.get("repeats", 0))
            if world is not None and inside:
                self._leave(world)
        elif kind == "commit":
            for member in world.members if world is not None and inside else ():
                member.commits = int(record.get("commits", 0))
            self._story.progress(int(record.get("commits", 0)))
            self._limits.progress()
            self._fill()
            self._hosts.well()
        elif kind == "end":
            worker.well = True
        elif world is None or not inside or record.get("number") != world.number:
            return
        elif kind == "running":
            world.running = True
        elif kind == "done":
            world.done.add(worker.number)
            self._finish(world)
        elif kind == "broken" and not world.closing:
            rank = world.members.index(worker)
            self._story.deaths.append(f"worker {worker.number} (rank {rank}) has lost its connections")
            self._limits.failed(None)
            self._break(world, str(record.get("reason")))
        self._settle()

    def _finish(self, world: World) -> None:
        if (
            world.finished
            or world.closing
            or any(worker.number not in world.done for worker in world.members)
        ):
            return
        world.finished = self._ending = True
        world.send("finish")
        for worker in self._workers.values():
            if worker not in world.members:
                self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        if not worker.ended and not worker.dismissed:
            worker.dismissed = True
            rank = self._ranks[worker.number]
            rank.stop_sent = time.time()
            _tree.kill_group(worker.process)

    # --- ends -----------------------------------------------------------------------------------

    def _reap(self, rank: Rank) -> None:
        worker = self._workers[rank.number]
        worker.link.drain()
        _tree.kill_group(worker.process)  # what it has started; before its number can be another's
        outcome = self._take_outcome(rank)
        inside = self._world is not None and worker in self._world.members
        worker.close()
        rank.streams.close()
        if self._stopping or worker.dismissed:
            return
        if self._ending or outcome.suspended or (not outcome.failed and not self._unfinished(worker)):
            self._end_of_one(worker, outcome)
        elif worker.raised:
            self._settle()
        else:
            self._lose(worker, outcome, inside=inside)

    def _unfinished(self, worker: Worker) -> bool:
        """Whether others of its world are in the training, which it has left without a word."""
        world = self._world
        return world is not None and world.running and worker in world.members and not world.finished

    def _end_of_one(self, worker: Worker, outcome: Outcome) -> None:
        """The job is ending: nobody is replaced any more."""
        self._ending = True
        self._enough.at = self._refill.at = None
        world = self._world
        if world is None or worker not in world.members:
            return
        rank = world.members.index(worker)
        if (
            not outcome.suspended
            and outcome.record is None
            and (worker.well or (world.finished and rank > 0 and outcome.code < 0))
        ):
            # Its script had come to its end, or the others do not need it any more.
            self._guard.ended(replace(outcome, rank=rank, code=0))
            if worker.well:
                outcome.code = 0
            return
        self._guard.ended(replace(outcome, rank=rank))
        if outcome.failed:
            self._on_failure(ON_ITS_WAY_OUT if outcome.told else AFTER_FAILURE)

    def _on_news(self, rank: int, record: Mapping[str, Any]) -> None:
        """A worker has raised. It may hang on its way out, but the others need not wait for that."""
        worker = self._workers.get(rank)
        if worker is None or worker.ended or worker.raised or self._stopping or worker.dismissed:
            return
        if self._guard.verdict is not None or self._ending:
            super()._on_news(rank, record)
            return
        worker.raised = True
        self._hurry.by(time.monotonic() + ON_ITS_WAY_OUT)
        outcome = Outcome(
            rank=rank,
            code=1,
            ended=time.time(),
            record=dict(record),
            host=None if worker.away is None else worker.host,
        )
        inside = self._world is not None and worker in self._world.members
        self._lose(worker, outcome, inside=inside)

    def _kill_raised(self) -> None:
        for worker in self._workers.values():
            if worker.raised and not worker.ended:
                _tree.kill_group(worker.process)

    def _lose(self, worker: Worker, outcome: Outcome, *, inside: bool) -> None:
        """A worker has failed."""
        if self._guard.verdict is not None:
            self._on_failure(ON_ITS_WAY_OUT if outcome.told else AFTER_FAILURE)
            return
        world = self._world
        place = f" (rank {world.members.index(worker)})" if world is not None and inside else ""
        how = _report.how(outcome) if outcome.failed else "it left the others with exit code 0"
        echo = outcome.echo and world is not None and world.broken is not None
        if not echo and not worker.lost:
            self._story.deaths.append(f"worker {worker.number}{place} has failed: {how}")
        given_up = None if echo or not self._counts(worker, outcome) else self._limits.failed(outcome)
        if given_up is not None:
            self._give_up(given_up, outcome)
            return
        if world is not None and inside and not world.closing:
            self._break(world, f"worker {worker.number}{place} has failed: {how}")
            if self._stopping:
                return
        if not inside:
            self._story.tell_deaths()
        if world is not None and len(world.living) - worker.raised >= self._elastic.least and inside:
            self._refill.by(time.monotonic() + SURVIVORS_FIRST)
        else:
            self._fill()
        self._settle()

    def _counts(self, worker: Worker, outcome: Outcome) -> bool:
        """Whether it is a failure of its own: of the workers that are lost with their host, one counts."""
        if worker.away is None or not worker.lost:
            self._hosts.failed(worker.host)
            return True
        counted, worker.away.counted = worker.away.counted, True
        return not counted

    def _on_host_gone(self, host: AwayHost, why: str, surely: float) -> None:
        numbers = [worker.number for worker in self._living if worker.away is host]
        with_whom = (
            f" with {plural(len(numbers), 'worker')} {', '.join(map(str, numbers))}" if numbers else ""
        )
        self._story.deaths.append(f"host {host.name} is lost{with_whom}: {why}")
        if not numbers:
            self._story.tell_deaths()
        world = self._world
        if world is not None and all(worker.ended or worker.away is host for worker in world.members):
            # Nobody is left to say that this world is over; where it is out of reach it may go on until then.
            self._surely.at = max(surely, self._surely.at or surely)

    def _break(self, world: World, reason: str) -> None:
        given_up = self._limits.reset(reason)
        if given_up is not None:
            self._give_up(given_up, None)
            return
        world.broken = reason
        world.send("reset", reason=reason)
        self._leave(world)

    def _leave(self, world: World) -> None:
        """The members are on their way to the next world."""
        if not world.leaving:
            world.leaving = True
            self._guard.close()
            self._gather.at = time.monotonic() + self._patience

    def _on_not_gathered(self) -> None:
        """Members of a world that has ended have not come: they hang."""
        if self._world is None or self._stopping:
            return
        for worker in self._world.living:
            if not worker.ready:
                self._story.say(f"worker {worker.number} does not come to the next world, and is killed")
                _tree.kill_group(worker.process)

    # --- worlds ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Form a world if it is time to, and tell those who wait what to do."""
        world = self._world
        if self._stopping or self._ending or self._surely.at is not None:
            return
        if world is not None and not world.closing:
            self._meanwhile(world)
            return
        living = self._living
        old = [worker for worker in world.members if worker in living] if world is not None else []
        if any(not worker.ready for worker in old):
            return
        prepared = [worker for worker in living if worker.ready and worker.prepared]
        if prepared or any(worker.alone for worker in living):
            self._send_alone(living)
            chosen = in_order(prepared, old)
        else:  # nobody has anything yet: all begin together
            chosen = in_order([worker for worker in living if worker.ready], old)
            if (len(chosen) < len(living) or self._agents.pending) and self._enough.at is not None:
                return
        for index in may_go(chosen, self._hosts.leaving([worker.host for worker in chosen]))[::-1]:
            worker = chosen.pop(index)
            self._story.deaths.append(f"worker {worker.number} leaves: {worker.host} has no place for it now")
            self._dismiss(worker)
        if len(chosen) < self._elastic.least:
            self._wait_for_enough()
            return
        # Who stays for its state alone takes nobody's place.
        stays = len(self._hosts.leaving([worker.host for worker in chosen]))
        self._form(chosen[: self._elastic.most + stays])

    def _meanwhile(self, world: World) -> None:
        """Others have come while the world is at work."""
        if not world.running:
            return
        outside = [worker for worker in self._workers.values() if worker not in world.members]
        self._send_alone(outside)
        leaving = self._hosts.leaving([worker.host for worker in world.members])
        if any(worker.ready and worker.prepared for worker in outside) or may_go(world.members, leaving):
            world.send("updated")

    def _send_alone(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.ready and not worker.prepared:
                worker.alone = True
                worker.answer({"kind": "alone"})

    def _form(self, members: list[Worker]) -> None:
        before = self._world
        self._world = world = World(number=self._worlds, members=members)
        world.running = any(worker.prepared for worker in members)
        self._worlds += 1
        self._enough.at = self._gather.at = None
        self._story.tell(before, world)
        self._guard.close()
        self._guard = self._guard_of(
            replace(self._job, workers=len(members)),
            averted=self._avert,
            hosts=[socket.gethostname() if worker.away is None else worker.host for worker in members],
        )
        world.begin(self._guard)
        for worker in members:
            worker.alone = False

    def _avert(self, verdict: Verdict) -> bool:
        """A rank that does not come is killed and replaced, rather than the job stopped."""
        world = self._world
        if verdict.kind != "late-rank" or world is None or world.closing or self._ending:
            return False
        late = world.at(verdict.ranks)
        if not late or len(late) == len(world.living):
            return False
        for worker in late:
            _tree.kill_group(worker.process)
        return True

    # --- limits ---------------------------------------------------------------------------------

    def _wait_for_enough(self) -> None:
        if self._enough.at is None:
            self._enough.at = time.monotonic() + self._elastic.timeout

    def _on_not_enough(self) -> None:
        ready = sum(worker.ready for worker in self._workers.values())
        if ready >= self._elastic.least:
            self._settle()
        else:
            text = f"hora: {ready} {plural(ready, 'worker')} of the {self._elastic.least} that "
            text += f"--min-workers asks for came within {self._elastic.timeout:g} s"
            text += "".join(f"; host {name}: {why}" for name, why in self._agents.problems.items())
            self._halt(text, exit_code=NOT_ENOUGH)

    def _give_up(self, text: str, outcome: Outcome | None) -> None:
        self._story.say(text)
        if outcome is None:
            self._halt(f"hora: {text}", exit_code=NOT_ENOUGH)
        else:
            world = self._world
            worker = self._workers[outcome.rank]
            rank = world.members.index(worker) if world is not None and worker in world.members else 0
            self._fatal = replace(outcome, rank=rank, log=worker.number)
            self._on_failure(AFTER_FAILURE)

    # --- end ------------------------------------------------------------------------------------

    def _outcomes(self) -> list[Outcome]:
        if self._fatal is not None:
            return [self._fatal]
        world = self._world
        members = world.members if world is not None else list(self._workers.values())
        return last_ends(world, members, [rank.outcome for rank in self._ranks])

    def _size(self) -> int:
        return len(self._workers if self._world is None else self._world.members)
