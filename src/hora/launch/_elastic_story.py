"""What is told of an elastic job: one line for each new world, on the console and in ``worlds.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Callable

from hora.core.errors import RunDirectoryError
from hora.core.plural import plural
from hora.core.rundir import RunDirectory
from hora.launch._elastic_workers import World

__all__ = ["Story"]


class Story:
    """Tells it.

    Args:
        run: where it is written down.
        quiet: whether the console is not told.
        say: shows a text on the console.

    Attributes:
        deaths: who failed and how, since the last world began.
    """

    def __init__(self, run: RunDirectory, *, quiet: bool, say: Callable[[str], None]) -> None:
        self._run = run
        self._quiet = quiet
        self._console = say
        self.deaths: list[str] = []
        self._committed = 0

    def progress(self, commits: int) -> None:
        """So many commits were made."""
        self._committed = commits

    def say(self, text: str) -> None:
        """Show a line."""
        if not self._quiet:
            self._console(f"hora: {text}")

    def tell(self, before: World | None, world: World) -> None:
        """A world begins."""
        new = [worker for worker in world.members if before is None or worker not in before.members]
        repeats = max(worker.repeats for worker in world.members)
        commits = max(worker.commits for worker in world.members)
        record = {
            "number": world.number,
            "time": time.time(),
            "workers": [worker.number for worker in world.members],
            "hosts": [worker.host for worker in world.members],
            "reason": before.broken if before is not None else None,
            "commits": commits,
            "repeats": repeats,
        }
        try:
            self._run.append_world(record)
        except RunDirectoryError as error:
            self.say(f"a world is not written down: {error}")
        deaths, self.deaths = self.deaths, []
        if before is None:
            return
        if commits:
            again = f"{repeats} {plural(repeats, 'step')} {'is' if repeats == 1 else 'are'} repeated"
            where = f"from commit {commits}" + (f", {again}" if before.broken is not None else "")
        elif self._committed:
            where = (
                "anew: what was committed in memory is lost, hora.Checkpoints restores its newest checkpoint"
            )
        else:
            where = "from the beginning"
        if new:
            numbers = ", ".join(str(worker.number) for worker in new)
            deaths.append(f"{plural(len(new), 'worker')} {numbers} taken in")
        size = len(world.members)
        who = f"{size} {plural(size, 'worker')} go{'es' * (size == 1)} on {where}"
        self.say("; ".join([*deaths, who]))

    def tell_deaths(self) -> None:
        """Say who failed, where no new world tells of it."""
        for text in self.deaths:
            self.say(text)
        self.deaths.clear()
