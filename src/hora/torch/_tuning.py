"""Which size of buckets makes steps shortest here? Tried in the first steps of a training.

Small buckets leave early, while backward still runs; large ones cost fewer messages. Which wins depends on
the model, the machine and the batch, so it is measured: each size for some steps, on the job's own steps.
All ranks try the same size in the same step and choose by the sum of their times, so they agree. On the
shared-memory engine the sums have the same bits whatever the buckets, so tuning changes no result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hora.torch._context import Context

__all__ = ["FIRST", "Tuning", "note"]

FIRST = 25.0
"""MB of the buckets in a training's first steps, and of those that are kept unless others are faster."""

SIZES = (FIRST, 4.0, 100.0, 1.0)
"""MB of the buckets that are tried."""

UNTIMED = 10
"""Steps before the first trial: a training's first ones are slow for other reasons."""

SETTLING = 2
"""Steps of each trial that do not count: its buckets get their memory."""

COUNTED = 8
"""Steps of each trial that count, by their median."""

GAIN = 0.02
"""Part of the step's time that another size must save to be chosen: less is noise."""


class Tuning:
    """The trials of one optimizer.

    Args:
        given: the size, if the user gave one: then nothing is tried.
        layout: what tells buckets of one size from those of another. Sizes with equal layouts are tried once.
        add_up: sums numbers over the ranks.
        chosen: called when the trials are over.
        clock: seconds.

    Attributes:
        size: MB of the buckets in the step that comes next.
        times: median seconds of a step, by size; after the last trial, means over the ranks.
        done: whether the size is chosen.
    """

    def __init__(
        self,
        given: float | None,
        layout: Callable[[float], object],
        add_up: Callable[[Sequence[float]], Sequence[float]],
        *,
        chosen: Callable[[Tuning], None] = lambda tuning: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.size = FIRST if given is None else given
        self.times: dict[float, float] = {}
        self._add_up, self._chosen, self._clock = add_up, chosen, clock
        self._given, self._layout = given, layout
        self._step = 0
        self.renew()
        self._began = 0.0
        self._seconds: list[float] = []

    def renew(self) -> None:
        """Other sizes may differ now than did before; without effect once the trials have begun."""
        if self._step < UNTIMED:
            layouts: dict[object, float] = {}
            for size in SIZES if self._given is None else ():
                layouts.setdefault(self._layout(size), size)
            self._sizes = list(layouts.values())
            self.done = len(self._sizes) < 2

    def settle(self, size: float) -> None:
        """No more trials: this is the size."""
        self.size, self.done = size, True

    def after_step(self) -> None:
        """A step has ended; ``size`` may be another now."""
        if self.done:
            return
        now = self._clock()
        self._step += 1
        trial, step = divmod(self._step - UNTIMED, SETTLING + COUNTED)
        if self._step > UNTIMED and (step > SETTLING or step == 0):
            self._seconds.append(now - self._began)
        self._began = now
        if self._step < UNTIMED or step:
            return
        if self._seconds:
            self.times[self.size] = statistics.median(self._seconds)
            self._seconds = []
        if trial < len(self._sizes):
            self.size = self._sizes[trial]
        else:
            self._choose()

    def _choose(self) -> None:
        count, *totals = self._add_up([1.0, *self.times.values()])
        self.times = {size: total / count for size, total in zip(self.times, totals, strict=True)}
        best = min(self.times, key=self.times.__getitem__)
        self.size = best if self.times[best] < (1 - GAIN) * self.times[FIRST] else FIRST
        self.done = True
        self._chosen(self)


def note(context: Context, tuning: Tuning) -> None:
    """Write down what was chosen, and why: in the timeline and in ``run.json``."""
    milliseconds = {f"{size:g} MB": round(1000 * time, 3) for size, time in tuning.times.items()}
    context.timeline.mark("bucket size", chosen=f"{tuning.size:g} MB", milliseconds=milliseconds)
    if context.run is not None and context.world.rank == 0:
        context.run.describe(buckets={"chosen_mb": tuning.size, "milliseconds_per_step": milliseconds})
