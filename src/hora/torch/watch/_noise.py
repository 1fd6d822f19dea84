"""Looks at the random numbers that are drawn while torch's data loaders load, here or in loader workers.

Loader workers write what they have drawn from into memory that they share, since they are forked; those that
are started otherwise are not looked at.
"""

from __future__ import annotations

import functools
import json
import mmap
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as fetching

from hora.torch.watch._generators import Drawn, drawn, generators_of, states

if TYPE_CHECKING:
    from hora.torch.watch._watch import Watch

__all__ = ["Noise"]

FETCHES = 4
"""Batches of each loader worker that are looked at."""

EPOCHS = 4
"""Epochs of loaders with workers that are looked at, if steps are made in them."""

TWICE = 2
"""Batches in a row of a loader worker that must have started from the same states: a generator may be used
once, as for an order that all share."""

WORKERS = 64
"""Loader workers of one loader that have a place to write."""

PLACE = 256
"""Bytes of such a place, for one batch."""


@dataclass
class _Epoch:
    """One pass of a loader with workers."""

    number: int
    dataset: int
    workers: int
    where: str | None
    step: int
    order: list[Any] = field(default_factory=list)
    delivered: int = 0
    drawn: dict[tuple[int, int], Drawn] = field(default_factory=dict)
    judged: bool = False


class Noise:
    """Notes from which states random numbers are drawn while batches are loaded."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._memory = mmap.mmap(-1, EPOCHS * WORKERS * FETCHES * PLACE)
        self._number = 0
        self._looked = 0
        self._told = False
        self._before: Any = weakref.WeakKeyDictionary()
        self._own: Any = weakref.WeakKeyDictionary()
        self._epochs: Any = weakref.WeakKeyDictionary()
        self._last: dict[int, _Epoch] = {}

    def install(self) -> Callable[[], None]:
        """Watch from now on, until the returned function is called."""
        kind: Any = fetching._MapDatasetFetcher
        original = kind.fetch
        worker = _Worker(self._memory)

        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            info = get_worker_info()
            if info is None or not self._number or worker.fetches >= FETCHES:
                return original(fetcher, index)
            return worker.fetch(
                functools.partial(original, fetcher, index), info, self._number, _count(index)
            )

        kind.fetch = fetch

        def undo() -> None:
            if kind.fetch is fetch:
                kind.fetch = original

        return undo

    # --- what data loaders do -------------------------------------------------------------------

    def begins(self, iterator: Any, loader: Any, where: str | None) -> None:
        """A pass over a loader of torch's begins, and its workers start."""
        workers = getattr(iterator, "_num_workers", 0)
        if not workers and self._watch.inputs.is_open:
            self._own[iterator] = generators_of(loader.dataset)
        # Workers that go on do not start anew.
        if not workers or iterator in self._epochs or self._looked >= EPOCHS:
            self._number = 0
            return
        self._looked += 1
        self._number = self._looked
        self._epochs[iterator] = _Epoch(self._number, id(loader.dataset), workers, where, self._watch.step)

    def unwatched(self) -> None:
        """A pass begins of a loader that sees to its random numbers itself."""
        self._number = 0

    def will_load(self, iterator: Any, index: Any) -> None:
        """The batch of these samples is loaded next in this process, or is ordered from a worker."""
        if self._watch.inputs.is_open and not getattr(iterator, "_num_workers", 0):
            self._before[iterator] = (_count(index), states(self._own.get(iterator, ())))

    def delivered(self, iterator: Any, order: Callable[[], list[Any]]) -> None:
        """A batch is there.

        Args:
            iterator: the pass.
            order: gives the samples of the pass so far.
        """
        if iterator in self._before:
            samples, before = self._before.pop(iterator)
            self._watch.inputs.fetched(drawn(before, states(self._own.get(iterator, ())), samples=samples))
            return
        epoch: _Epoch | None = self._epochs.get(iterator)
        if epoch is None or epoch.delivered >= FETCHES * epoch.workers:
            return
        # torch hands the batches to its workers in turn.
        fetch, worker = divmod(epoch.delivered, epoch.workers)
        epoch.delivered += 1
        from_ = epoch.drawn[worker, fetch] = _read(self._memory, epoch.number, worker, fetch)
        self._watch.inputs.fetched({f"worker {kind}": state for kind, state in from_.items()})
        if epoch.delivered > TWICE * epoch.workers and not epoch.judged and self._watch.step > epoch.step:
            epoch.judged = True
            epoch.order = order()
            self._judge(epoch)

    # --- what comes of it -----------------------------------------------------------------------

    def _judge(self, epoch: _Epoch) -> None:
        """Steps are made in this pass, so it is a training's. Does it repeat what was drawn before?"""
        if self._told:
            return
        for worker in range(1, epoch.workers):
            if kinds := _same(epoch, 0, epoch, worker):
                self._tell("workers", kinds[0], epoch)
                return
        before = self._last.get(epoch.dataset)
        self._last[epoch.dataset] = epoch
        if before is None:
            return
        count = min(len(before.order), len(epoch.order))
        # One that repeats its order too is another matter.
        if before.order[:count] != epoch.order[:count] and (kinds := _same(before, 0, epoch, 0)):
            self._tell("epochs", kinds[0], epoch)

    def _tell(self, how: str, generator: str, epoch: _Epoch) -> None:
        self._told = True
        self._watch.reporter.send(
            {
                "kind": "noise",
                "how": how,
                "generator": f"worker {generator}",
                "where": epoch.where,
                "step": self._watch.step,
            }
        )


class _Worker:
    """What a loader worker does; made before it is forked."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._own: list[Any] | None = None
        self.fetches = 0

    def fetch(self, original: Callable[[], Any], info: Any, number: int, samples: int) -> Any:
        """Load a batch, and tell what was drawn for it."""
        before = self._harmless(lambda: self._states(info.dataset))
        result = original()
        if before is not None:
            found = self._harmless(lambda: drawn(before, self._states(info.dataset), samples=samples))
            if found:
                _write(self._memory, number, info.id, self.fetches, found)
        self.fetches += 1
        return result

    def _states(self, dataset: Any) -> list[Any]:
        if self._own is None:
            self._own = generators_of(dataset)
        return states(self._own)

    def _harmless(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception:  # noqa: BLE001 - a fault of the watch is not the training's, and nobody hears of it here
            self.fetches = FETCHES
            return None


def _count(index: Any) -> int:
    return len(index) if isinstance(index, list | tuple) else 1


_LENGTH = struct.Struct("<H")


def _write(memory: mmap.mmap, number: int, worker: int, fetch: int, found: Drawn) -> None:
    data = json.dumps(found).encode()
    if worker < WORKERS and len(data) <= PLACE - _LENGTH.size:
        place = _place(number, worker, fetch)
        memory[place : place + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data


def _read(memory: mmap.mmap, number: int, worker: int, fetch: int) -> Drawn:
    """What a worker wrote before it handed over a batch; nothing, if it drew nothing."""
    if worker >= WORKERS:
        return {}
    place = _place(number, worker, fetch)
    (length,) = _LENGTH.unpack_from(memory, place)
    start = place + _LENGTH.size
    found: Drawn = json.loads(memory[start : start + length]) if length else {}
    return found


def _place(number: int, worker: int, fetch: int) -> int:
    return (((number - 1) * WORKERS + worker) * FETCHES + fetch) * PLACE


def _same(one: _Epoch, first: int, other: _Epoch, second: int) -> list[str]:
    """Kinds of generators from which two workers have drawn from the same states, in several batches."""
    pairs = [
        (one.drawn.get((first, fetch), {}), other.drawn.get((second, fetch), {})) for fetch in range(TWICE)
    ]
    return [kind for kind in pairs[0][0] if all(a.get(kind) == b.get(kind) is not None for a, b in pairs)]
