"""The training loop's outer frame: epochs over a loader, shown to whoever watches."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch

from hora.core.errors import DiskFullError, UsageError
from hora.core.presentation import presenting
from hora.core.progress import Display, Progress, SilentDisplay, display
from hora.torch._context import required
from hora.torch._loader import Loader

__all__ = ["Tracker", "track"]

Batch = TypeVar("Batch")

_WINDOW = 3.0
"""Seconds over which the displayed rate is taken."""


def track(loader: Iterable[Batch], *, epochs: int | None = None, total: int | None = None) -> Tracker[Batch]:
    """Iterate over the batches of all epochs, with live progress on rank 0.

    With a :class:`Loader` it goes from ``loader.epoch`` up to ``epochs``, so that a resumed training
    makes only what is left of it, and counts the samples of all workers. Any other iterable is gone
    through ``epochs`` times and counts steps. Nothing here waits for another rank.

    Args:
        loader: what ``data_loader`` returned, or any iterable of batches.
        epochs: of the whole training; None is the one that ``loader`` is at.
        total: units (samples, or steps) of the whole training, if it ends otherwise than ``epochs`` says.
    """
    return Tracker(loader, epochs=epochs, total=total)


class Tracker(Generic[Batch]):
    """Iterates over batches and shows progress; made by :func:`track`.

    Attributes:
        step: steps of the training so far, those before a resume included.
        epoch: the current epoch; the first is 0.
        samples: samples of all workers up to and with the current batch (steps, if not a loader's).
    """

    def __init__(self, loader: Iterable[Batch], *, epochs: int | None, total: int | None) -> None:
        if epochs is not None and (not isinstance(epochs, int) or epochs < 0):
            raise UsageError(f"epochs={epochs!r} is not a whole number of epochs.", fix="Write epochs=10.")
        self._context = required("track")
        self._loader = loader
        self._own = loader if isinstance(loader, Loader) else None
        first = self._own.epoch if self._own is not None else 0
        self._epochs = first + 1 if epochs is None else epochs
        if self._context.watch is not None:
            self._context.watch.plan.epochs(self._epochs - first)
        self._total = max(self._epochs, first) * self._per_epoch() if total is None else total
        self._watched = self._context.world.rank == 0
        self._display: Display = SilentDisplay()
        self._values: dict[str, float] = {}
        self._started = time.perf_counter()
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._logged: tuple[float, int] = (self._started, 0)
        self._before = 0.0
        self._incomplete = False
        self.step = self._steps_before()
        self.epoch = first
        self.samples = self._done_before()

    def __iter__(self) -> Iterator[Batch]:
        if self._watched:
            self._display = display(self._context.settings, stream=sys.stderr)
        self._started = time.perf_counter()
        self._logged = (self._started, self.samples)
        self._recent.append(self._logged)
        self._before = self._seconds_before()
        try:
            for epoch in range(self.epoch, self._epochs):
                self.epoch = epoch
                for batch in self._batches():
                    self.step += 1
                    self.samples += self._units()
                    yield batch
                    self._show()
        except GeneratorExit:
            self._show()  # the loop was left by break: what was logged since the last batch
            raise
        finally:
            self._display.close()

    def log(self, **values: Any) -> None:
        """Show values beside the progress, and keep them as one record of ``metrics.jsonl``.

        Rank 0 shows and writes, the others do nothing, so give values that are already reduced
        (``hora.mean``). Numbers and tensors of one element are shown; anything that JSON can hold is
        written. ``kind="eval"`` marks a record of an evaluation; its values are shown as "eval loss".
        Where the disk is full they are shown only, and training goes on.
        """
        if not self._watched:
            return
        with presenting():
            plain = {name: _plain(value) for name, value in values.items()}
        kind = values.get("kind", "train")
        prefix = "" if kind == "train" else f"{kind} "
        self._values |= {prefix + name: value for name, value in plain.items() if isinstance(value, float)}
        if self._context.run is None:
            return
        now = time.perf_counter()
        since, before = self._logged
        self._logged = (now, self.samples)
        record: dict[str, Any] = {
            "kind": "train",
            "step": self.step,
            "epoch": self._fractional_epoch(),
            "time": self._before + now - self._started,
        }
        if self.samples > before:
            record["samples_per_second"] = (self.samples - before) / max(now - since, 1e-9)
        try:
            self._context.run.append_metrics(record | plain)
        except DiskFullError as error:
            self._lost(error)

    def note(self, text: str) -> None:
        """Say something once beside the progress, such as "target reached"."""
        if self._watched:
            with presenting():
                self._display.note(text)

    def _lost(self, error: DiskFullError) -> None:
        """A training of hours does not end for a line that nobody can write; it is told once."""
        if not self._incomplete:
            self._incomplete = True
            warn = f"hora: metrics.jsonl is incomplete from step {self.step} on: {error.what}"
            print(warn, file=sys.stderr, flush=True)

    @property
    def rate(self) -> float:
        """Samples (or steps) per second of all workers over the last seconds."""
        if len(self._recent) < 2:
            return 0.0
        (since, before), (now, done) = self._recent[0], self._recent[-1]
        return (done - before) / max(now - since, 1e-9)

    def _show(self) -> None:
        if not self._watched:
            return
        now = time.perf_counter()
        self._recent.append((now, self.samples))
        while now - self._recent[0][0] > _WINDOW and len(self._recent) > 2:
            self._recent.popleft()
        with presenting():
            self._display.update(
                Progress(
                    done=self.samples,
                    total=self._total,
                    unit="samples" if self._own is not None else "steps",
                    step=self.step,
                    epoch=self.epoch + 1,
                    epochs=self._epochs,
                    values=self._values,
                    rate=self.rate,
                    size=self._context.world.size,
                )
            )

    def _batches(self) -> Iterator[Batch]:
        """One pass over the loader, in the timeline. One of ``data_loader`` sees to that itself."""
        if self._own is not None:
            yield from self._loader
            return
        timeline, batches = self._context.timeline, iter(self._loader)
        while True:
            start = time.time()
            try:
                batch = next(batches)
            except StopIteration:
                return
            ready = time.time()
            timeline.add("wait for data", start, ready, lane="data")
            yield batch
            timeline.add("step", ready, time.time(), lane="steps")

    def _units(self) -> int:
        if self._own is None:
            return 1
        return self._own.samples_now

    def _per_epoch(self) -> int:
        """Units that one whole epoch hands out; 0 when nobody knows."""
        if self._own is not None:
            return self._own.samples_per_epoch
        try:
            return len(self._loader) if isinstance(self._loader, Sized) else 0
        except TypeError:  # torch's DataLoader has a __len__, which raises for an iterable data set
            return 0

    def _done_before(self) -> int:
        if self._own is None:
            return 0
        return self._own.epoch * self._per_epoch() + self._own.state_dict()["position"] % self._own.samples

    def _steps_before(self) -> int:
        """Steps of the whole training that a resumed one does not make again."""
        if self._own is None:
            return 0
        return self._own.steps

    def _seconds_before(self) -> float:
        """Time of the last record that an earlier attempt of this run has left (``hora run --restarts``)."""
        context = self._context
        if not self._watched or context.run is None or (context.settings.attempt or 1) == 1:
            return 0.0
        times = [record.get("time", 0.0) for record in context.run.read_metrics()]
        return max(times, default=0.0)

    def _fractional_epoch(self) -> float:
        per_epoch = self._per_epoch()
        return self.samples / per_epoch if per_epoch else float(self.epoch)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value.detach())
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
