"""Watches a training for the guard: small records of what each step did, for the supervisor to compare.

:class:`Watch` is that of one job, whatever the framework; ``hora.torch`` builds on it. Adapters that see the
gradients of a step, or what it is fed, report them by a :class:`hora.adapter.training.Training`. Nothing here
calls a collective, waits for another rank, or lets a fault of its own reach the training: then it says so
once and is silent.
"""

from __future__ import annotations

import collections
import functools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from hora.adapter.frames import user_frames
from hora.adapter.prints import sample
from hora.core.errors import VerdictError
from hora.core.events import Timeline
from hora.guard.reporter import Reporter

if TYPE_CHECKING:
    from hora.adapter.training import Training

__all__ = ["EARLY", "Watch", "here", "unharmed"]

EARLY = 8
"""Steps, from the start and from that of each training, in which it is looked at what loaders hand out."""

KEPT = 64
"""Batches handed out since a step: an evaluation may take many."""

P = ParamSpec("P")
R = TypeVar("R")


class Harmless(Protocol):
    """Whose faults are none of the training's."""

    reporter: Reporter

    @property
    def broken(self) -> bool:
        """Whether one has ended it."""

    def give_up(self, error: Exception) -> None:
        """Say what went wrong, and watch no more."""


H = TypeVar("H", bound=Harmless)


def unharmed(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R | None]:
    """A method that says what went wrong in it, once, rather than raising it into the training."""

    @functools.wraps(method)
    def call(self: H, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.broken or not self.reporter.active:
            return None
        try:
            return method(self, *args, **kwargs)
        except VerdictError:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the watch is not the training's
            self.give_up(error)
            return None

    harmless: Any = call
    return harmless  # type: ignore[no-any-return]


def here() -> str | None:
    """The user's line."""
    frames = user_frames(1)
    return f"{frames[0][0]}:{frames[0][1]}" if frames else None


class Watch:
    """The watch of one job on one rank.

    Args:
        reporter: the link to the supervisor.
        rank: this rank.
        size: number of ranks.
        generation: which ``init()`` of this process it belongs to: what comes after is another training.

    Attributes:
        step: steps of the training that has made most.
        data: seconds that this rank has waited for data, but for work of its own that it has declared.
        loading: how many loaders are at work, one inside the other.
        broken: whether a fault has ended it.
        outer: the training of a ``fit`` that is under way.
        states: a word for the states of the generators that the model of a ``fit`` draws from; None: it draws
            nothing.
        handed: the last batches that loaders have handed out, in the first steps: their numbers in order, and
            numbers for what they hold.
        serial: the number of the last one.
        used: that of the last one before the last step.
        looks: steps in which it is still looked at them.
        numbers: trainings of each signature so far.
    """

    def __init__(self, reporter: Reporter, *, rank: int, size: int, generation: int) -> None:
        self.reporter = reporter
        self.rank, self.size = rank, size
        self.generation = generation
        self.step = 0
        self.data = 0.0
        self.loading = 0
        self.broken = False
        self.outer: Training | None = None
        self.states: str | None = None
        self.serial = self.used = 0
        self.looks = EARLY
        self.handed: collections.deque[tuple[int, int]] = collections.deque(maxlen=KEPT)
        self.numbers: dict[str, int] = {}

    def loading_from(self, batches: Iterator[Any], timeline: Timeline | None = None) -> Iterator[Any]:
        """The batches; the time that they take is time spent waiting for data, in the timeline too."""
        while True:
            self.loading += 1
            start = time.time()
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.loading -= 1
                self.loaded(time.perf_counter() - began)
                self.fetched()
            if timeline is not None:
                timeline.add("wait for data", start, time.time(), lane="data")
            self.handed_out(batch)
            yield batch

    def loaded(self, seconds: float) -> None:
        """This rank has waited so long for data."""
        if not self.reporter.is_alone:
            self.data += seconds

    def fetched(self) -> None:
        """A loader of Hora's was asked for a batch."""

    def handed_out(self, batch: Any) -> None:
        """A loader gives the script this batch."""
        self.note(batch)

    def stepped(self, step: int) -> None:
        """A training has made so many steps."""
        self.step = max(self.step, step)
        self.used = self.serial
        self.looks -= 1
        self.reporter.slot.pace(self.step, self.data, self.reporter.waited, time.monotonic())

    @unharmed
    def note(self, batch: Any) -> None:
        """The model is going to be fed this batch; looked at in the first steps."""
        if self.looks <= 0 or self.size == 1:
            return
        leaves = list(_leaves(batch))
        if not any(math.prod(each.shape) > 1 for each in leaves):
            return  # a number, as of the step
        self.serial += 1
        self.handed.append((self.serial, sum(sample(np.asarray(each)) for each in leaves)))

    def give_up(self, error: Exception) -> None:
        """Say what went wrong, and watch no more."""
        self.broken = True
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{type(error).__name__}: {error} at {Path(frame.filename).name}:{frame.lineno}"
        self.reporter.send({"kind": "trouble", "text": fault})
        self.stop()

    def stop(self) -> None:
        """Undo what makes it see the training."""


def _leaves(tree: Any) -> Iterator[Any]:
    """The tensors of a batch, whatever holds them."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _leaves(tree[key])
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from _leaves(each)
    elif hasattr(tree, "shape"):
        yield tree
