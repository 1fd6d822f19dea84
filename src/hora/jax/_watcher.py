"""Steps of compiled programs, as the guard sees them: when one starts, and when its results are there.

JAX runs programs behind the script's back: a call returns before its results are there. The board shows
this rank as waiting for as long as a step is under way.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from hora.adapter.agreement import agree
from hora.adapter.guard import Guard, Place, Spec
from hora.adapter.watch import Watch
from hora.core.events import Timeline
from hora.jax._notes import Notes
from hora.jax._training import Seen, Steps

if TYPE_CHECKING:
    from hora.jax._context import Context

__all__ = ["Watcher", "run"]

OFTEN = 0.25
"""Seconds between two looks at the last step; ranks are called late after seconds."""


def run(
    context: Context,
    name: str,
    shapes: Sequence[tuple[Any, tuple[int, ...]]],
    call: Callable[[], Any],
    *,
    owner: Any,
    arguments: Any,
    notes: Notes | None = None,
    prepare: Callable[[], Any] | None = None,
) -> Any:
    """Run a step under the guard.

    Args:
        context: the job.
        name: of the step.
        shapes: dtypes and shapes of the arguments, which all ranks must give alike.
        call: starts it; gives its results, and sums of gradients if it notes them.
        owner: the step itself, which may have others of its name beside it.
        notes: whose sums these are; filled in by the time the call returns.
        arguments: what it takes; those that all ranks share are compared now and then.
        prepare: compiles it, the first time: that takes each rank its own time, and none waits meanwhile.

    Raises:
        VerdictError: the ranks do not run the same; or the job is to stop for another reason.
    """
    key = (name, tuple(shapes))
    new = key not in context.seen
    context.seen.add(key)
    arrays = [Spec(*each) for each in shapes]
    if context.guard is None or context.watcher is None:
        if new:
            agree(context, "step", name, arrays, context.everyone)
        return call()[0]
    place = context.guard.enter("step", arrays, process_set=context.everyone, label=name)
    if new and prepare is not None:
        prepare()
    steps = context.steps.get(owner)
    if steps is None:
        assert context.watch is not None, "there is a guard"
        steps = context.steps[owner] = Steps(context.watch, name)
    seen = steps.before(arguments)
    results = context.watcher.run(place, name, call, steps=steps, seen=seen, notes=notes)
    if seen is not None:
        steps.after(results, seen)
    return results


class Watcher:
    """Knows which steps are under way.

    To wait for each step in another thread would wake that thread in each step, which takes longer than all
    else here on a host whose cores are busy. So the script itself looks, whenever it starts a step, which
    of those before have ended; and a thread looks now and then, for the last one.

    Args:
        guard: what reports to the supervisor.
        watch: knows how long this rank waits for data.
        timeline: gives where steps are written down, from their start until they were seen to have ended.
    """

    def __init__(self, guard: Guard, watch: Watch, timeline: Callable[[], Timeline]) -> None:
        self._guard = guard
        self._watch = watch
        self._data = 0.0
        self._timeline = timeline
        self._lock = threading.Lock()
        self._under_way: collections.deque[_Step] = collections.deque()
        self._began = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_now_and_then, name="hora-steps", daemon=True)
        self._thread.start()

    def run(
        self,
        place: Place,
        name: str,
        call: Callable[[], Any],
        *,
        steps: Steps,
        seen: Seen | None,
        notes: Notes | None,
    ) -> Any:
        """Start a step; this rank counts as waiting until its results are there."""
        step = _Step(place, name, time.time(), steps)
        with self._lock:
            self._sweep()
            self._under_way.append(step)
            if len(self._under_way) == 1:
                self._begin(place)
        try:
            results, sums = call()
        except BaseException as error:
            step.ended = True
            self._look()
            if isinstance(error, self._guard.failures):
                cause = self._guard.reporter.explain(error)
                if cause is not error:
                    raise cause from error
            raise
        # The last one: parameters and state come first as a rule, and may be donated to the next step.
        arrays = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]
        step.result = arrays[-1] if arrays else None
        step.ended = not arrays
        if seen is not None:
            if notes is not None:
                seen.sums, seen.names, seen.scaled = sums, notes.names, notes.scaled
            step.seen = seen
        return results

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            self._sweep()
            self._under_way.clear()

    def _look_now_and_then(self) -> None:
        while not self._closed.wait(OFTEN):
            self._look()

    def _look(self) -> None:
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        """End the steps whose results are there, in their order."""
        reporter = self._guard.reporter
        while self._under_way and self._under_way[0].is_over():
            step = self._under_way.popleft()
            reporter.wait_ends(step.place, self._began)
            # While a step is under way this rank loads the next batch, and that is its own time.
            reporter.waited = max(0.0, reporter.waited - (self._watch.data - self._data))
            if step.seen is not None:
                step.steps.ended(step.seen)
            self._timeline().add(step.name, step.began, time.time(), lane="steps")
            if self._under_way:
                self._begin(self._under_way[0].place)

    def _begin(self, place: Place) -> None:
        self._began = self._guard.reporter.wait_begins(place)
        self._data = self._watch.data


class _Step:
    """A step under way."""

    __slots__ = ("began", "ended", "name", "place", "result", "seen", "steps")

    def __init__(self, place: Place, name: str, began: float, steps: Steps) -> None:
        self.place, self.name, self.began, self.steps = place, name, began, steps
        self.seen: Seen | None = None
        self.result: jax.Array | None = None
        self.ended = False

    def is_over(self) -> bool:
        """Whether its results are there, or it has failed, or its result was donated to a later one."""
        if self.ended or self.result is None:
            return self.ended
        return bool(self.result.is_deleted() or self.result.is_ready())
