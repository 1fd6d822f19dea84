"""Looks at the random numbers that are drawn while torch's data loaders load, here or in loader workers.

Each torch, numpy and Python generator has a state before a batch is loaded. Ranks, epochs or loader workers
that start from the same one, and draw, draw the same. Loader workers write theirs into memory that they
share, since they are forked; those that are started otherwise are not looked at.
"""

from __future__ import annotations

import functools
import json
import mmap
import random
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import fetch as fetching

from hora.torch.watch._inputs import random_state

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

OBJECTS = 200
"""Objects of a data set among which generators of its own are looked for."""

DEPTH = 4

OWN = "own"
"""The name of generators that a data set keeps itself."""

Drawn = Mapping[str, str]
"""For each kind of generator that was drawn from, the state from which."""


class _State(NamedTuple):
    """A generator's state.

    Attributes:
        whole: all of it.
        seeded: the part that drawing few numbers does not change, and a new seed does.
    """

    whole: str
    seeded: str


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
            return worker.fetch(functools.partial(original, fetcher, index), info, self._number)

        kind.fetch = fetch

        def undo() -> None:
            if kind.fetch is fetch:
                kind.fetch = original

        return undo

    # --- what data loaders do -------------------------------------------------------------------

    def begins(self, iterator: Any, loader: Any, where: str | None) -> None:
        """A pass over a loader of torch's begins, and its workers start."""
        workers = getattr(iterator, "_num_workers", 0)
        if not workers:
            self._own[iterator] = _kept(loader.dataset)
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

    def will_load(self, iterator: Any) -> None:
        """The next batch is loaded in this process, or ordered from a worker."""
        if self._watch.inputs.is_open and not getattr(iterator, "_num_workers", 0):
            self._before[iterator] = _states(self._own.get(iterator, ()))

    def delivered(self, iterator: Any, order: Callable[[], list[Any]]) -> None:
        """A batch is there.

        Args:
            iterator: the pass.
            order: gives the samples of the pass so far.
        """
        before = self._before.pop(iterator, None)
        if before is not None:
            self._watch.inputs.fetched(_drawn(before, _states(self._own.get(iterator, ()))))
            return
        epoch: _Epoch | None = self._epochs.get(iterator)
        if epoch is None or epoch.delivered >= FETCHES * epoch.workers:
            return
        # torch hands the batches to its workers in turn.
        fetch, worker = divmod(epoch.delivered, epoch.workers)
        epoch.delivered += 1
        drawn = epoch.drawn[worker, fetch] = _read(self._memory, epoch.number, worker, fetch)
        self._watch.inputs.fetched({f"worker {kind}": state for kind, state in drawn.items()})
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

    def fetch(self, original: Callable[[], Any], info: Any, number: int) -> Any:
        """Load a batch, and tell what was drawn for it."""
        if self._own is None:
            self._own = self._harmless(lambda: _kept(info.dataset)) or []
        before = self._harmless(lambda: _states(self._own or ()))
        result = original()
        if before is not None:
            drawn = self._harmless(lambda: _drawn(before, _states(self._own or ())))
            if drawn:
                _write(self._memory, number, info.id, self.fetches, drawn)
        self.fetches += 1
        return result

    def _harmless(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception:  # noqa: BLE001 - a fault of the watch is not the training's, and nobody hears of it here
            self.fetches = FETCHES
            return None


_LENGTH = struct.Struct("<H")


def _write(memory: mmap.mmap, number: int, worker: int, fetch: int, drawn: Drawn) -> None:
    data = json.dumps(drawn).encode()
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
    drawn: Drawn = json.loads(memory[start : start + length]) if length else {}
    return drawn


def _place(number: int, worker: int, fetch: int) -> int:
    return (((number - 1) * WORKERS + worker) * FETCHES + fetch) * PLACE


def _same(one: _Epoch, first: int, other: _Epoch, second: int) -> list[str]:
    """Kinds of generators from which two workers have drawn from the same states, in several batches."""
    pairs = [
        (one.drawn.get((first, fetch), {}), other.drawn.get((second, fetch), {})) for fetch in range(TWICE)
    ]
    return [kind for kind in pairs[0][0] if all(a.get(kind) == b.get(kind) is not None for a, b in pairs)]


def _drawn(before: list[tuple[str, _State]], after: list[tuple[str, _State]]) -> dict[str, str]:
    """For each kind of generator from which was drawn, its state before.

    Where a sample seeds it, what is left afterwards belongs to that sample, and tells the two apart.
    """
    found: dict[str, list[str]] = {}
    for (kind, old), (_, new) in zip(before, after, strict=True):
        if old.whole != new.whole:
            found.setdefault(kind, []).append(f"{old.whole} {new.seeded}")
    return {kind: f"{zlib.crc32(' '.join(states).encode()):08x}" for kind, states in found.items()}


def _states(own: list[Any] | tuple[Any, ...]) -> list[tuple[str, _State]]:
    """The states of the generators that a data set may use: the global ones, and its own."""
    torch_state = random_state()
    return [
        ("torch", _State(str(torch_state), f"{torch_state[0]} {torch_state[3]}")),
        ("random", _python(random.getstate())),
        ("numpy", _numpy(numpy.random.get_state(legacy=False))),
        *((OWN, _state(generator)) for generator in own),
    ]


def _state(generator: Any) -> _State:
    if isinstance(generator, torch.Generator):
        raw = generator.get_state().numpy().tobytes()
        return _State(_crc(raw), _crc(raw[24:]) if len(raw) > 100 else "")
    if isinstance(generator, random.Random):
        return _python(generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return _numpy(generator.get_state(legacy=False))
    return _numpy(generator.bit_generator.state)


def _python(state: tuple[Any, ...]) -> _State:
    *keys, position = state[1]
    seeded = str(hash(tuple(keys)))  # of whole numbers: the same in each process
    return _State(f"{seeded} {position} {state[2]}", seeded)


def _numpy(state: Any) -> _State:
    inner = state["state"]
    keys = inner.get("key")
    if keys is None:
        return _State(_crc(repr(state).encode()), "")
    seeded = _crc(numpy.asarray(keys).tobytes())
    return _State(f"{seeded} {inner['pos']} {state.get('has_gauss')} {state.get('gauss')}", seeded)


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _kept(dataset: Any) -> list[Any]:
    """The generators that a data set keeps itself, or that its methods take from their module.

    Those of a stream are left out: that all shuffle the same before each takes its part is no fault.
    """
    if isinstance(dataset, IterableDataset):
        return []
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(dataset, 0)]
    while waiting and len(seen) < OBJECTS:
        thing, depth = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(
            thing, (torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator)
        ):
            found[id(thing)] = thing
        elif depth < DEPTH:
            waiting += [(inner, depth + 1) for inner in _inside(thing)]
    return list(found.values())


def _inside(thing: Any) -> Iterator[Any]:
    if isinstance(thing, list | tuple):
        yield from thing[:20]
    elif isinstance(thing, dict):
        yield from list(thing.values())[:20]
    elif not isinstance(thing, torch.Tensor | numpy.ndarray | str | bytes | int | float | type | ModuleType):
        yield from list(getattr(thing, "__dict__", {}).values())
        functions = [thing, *(getattr(type(thing), name, None) for name in _METHODS)]
        for function in functions:
            if isinstance(function, FunctionType):
                names = function.__code__.co_names
                yield from (function.__globals__[name] for name in names if name in function.__globals__)


_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
