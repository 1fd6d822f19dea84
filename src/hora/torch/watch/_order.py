"""Looks at the order of samples: torch's data loaders and permutations, for a training that repeats one."""

from __future__ import annotations

import functools
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler
from torch.utils.data import dataloader as loaders
from torch.utils.data.distributed import DistributedSampler

from hora.adapter.frames import user_frames
from hora.torch.watch._digest import sample
from hora.torch.watch._inputs import replace
from hora.torch.watch._noise import Noise

if TYPE_CHECKING:
    from hora.torch._loader import Loader
    from hora.torch.watch._watch import Watch

__all__ = ["Orders"]

SEEN = 64
"""Samples of an epoch whose order is kept."""

FEWEST = 8
"""So many samples in the same order are no chance: 1 in 40320."""

FOLLOWED = 4
"""Steps after a permutation in which its use must show."""


@dataclass
class _Epoch:
    """One pass over a data loader."""

    orders: Orders
    sampler: weakref.ref[Any] | None
    """Not the loader: one that is made in the line of the loop is gone once the loop runs."""
    where: str | None
    step: int
    last: int = 0
    """Steps at its last batch: an evaluation makes none."""
    indices: list[Any] = field(default_factory=list)
    compared: bool = False
    repeats: tuple[str, str] | None = None
    """How the order of the epoch before came again, and in what; no step has told of it yet."""
    before: _Epoch | None = None
    """The training's epoch before it."""


@dataclass
class _Own:
    """One epoch of a loader of Hora's, and the steps made at its beginning and its last batch."""

    loader: weakref.ref[Loader]
    order: tuple[Any, ...] | None
    step: int
    last: int
    repeats: str | None = None
    """The line that starts it, if the epoch before it had the same order, and no step has told of it yet."""


@dataclass
class _Drawn:
    """One permutation."""

    number: int
    step: int
    inputs: list[str | None] = field(default_factory=list)


class Orders:
    """Keeps the last epoch of each loader, and the last permutation of each line."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._last: weakref.WeakKeyDictionary[Any, _Epoch] = weakref.WeakKeyDictionary()
        self._drawn: dict[str, list[_Drawn]] = {}
        self._own: _Own | None = None
        self._told = False
        self._noise = Noise(watch)

    def install(self) -> Callable[[], None]:
        """Watch from now on, until the returned function is called."""
        base: Any = loaders._BaseDataLoaderIter
        originals = {name: getattr(base, name) for name in ("__init__", "_reset", "_next_index", "__next__")}
        watch = self._watch

        def init(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            originals["__init__"](iterator, loader, *args, **kwargs)
            self._start(iterator, loader)

        def reset(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            originals["_reset"](iterator, loader, *args, **kwargs)
            self._start(iterator, loader)

        def next_index(iterator: Any) -> Any:
            try:
                index = originals["_next_index"](iterator)
            except StopIteration:
                self._see(iterator, None)
                raise
            self._see(iterator, index)
            return index

        def following(iterator: Any) -> Any:
            if watch.loading:
                return originals["__next__"](iterator)
            watch.loading += 1
            began = time.perf_counter()
            try:
                return originals["__next__"](iterator)
            finally:
                watch.loading -= 1
                watch.loaded(time.perf_counter() - began)
                watch.plan.batches += 1
                epoch = self._epoch(iterator)
                if epoch is not None:
                    epoch.last = watch.step
                    self._goes_on(epoch)
                    watch.harmless(functools.partial(self._noise.delivered, iterator, epoch.indices.copy))

        def permuting(original: Callable[..., Any]) -> Callable[..., Any]:
            def permute(n: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(n, *args, **kwargs)
                if isinstance(n, int) and n >= FEWEST and not torch.compiler.is_compiling():
                    self._note(result)
                return result

            return permute

        for name, function in zip(originals, (init, reset, next_index, following), strict=True):
            setattr(base, name, function)
        forget = self._noise.install()
        restore = replace(torch, "randperm", permuting)
        watch.inputs.followers.append(self._follow)

        def undo() -> None:
            for name, function in zip(originals, (init, reset, next_index, following), strict=True):
                if getattr(base, name) is function:
                    setattr(base, name, originals[name])
            restore()
            forget()

        return undo

    # --- data loaders ---------------------------------------------------------------------------

    def _epoch(self, iterator: Any) -> _Epoch | None:
        epoch: _Epoch | None = iterator.__dict__.get("_hora_epoch")
        return epoch if epoch is not None and epoch.orders is self else None  # not that of an earlier init()

    def _start(self, iterator: Any, loader: Any) -> None:
        def start() -> None:
            known = self._epoch(iterator)
            if known is None or known.indices:
                if type(loader.batch_sampler).__module__.startswith("hora."):
                    self._noise.unwatched()
                    return  # inside a loader of Hora's
                frames = user_frames(1)
                where = f"{frames[0][0]}:{frames[0][1]}" if frames else None
                iterator._hora_epoch = _Epoch(self, _sampler(loader), where, self._watch.step)
                self._noise.begins(iterator, loader, where)
                self._watch.plan.loader(loader)

        self._watch.harmless(start)

    def _see(self, iterator: Any, index: Any) -> None:
        epoch = self._epoch(iterator)
        if epoch is None or self._watch.loading > 1:
            return

        def see() -> None:
            if index is not None:
                self._noise.will_load(iterator, index)
            if epoch.compared:
                return
            if index is not None:
                epoch.indices += index if isinstance(index, list | tuple) else [index]
            if index is None or len(epoch.indices) >= SEEN:
                del epoch.indices[4 * SEEN :]
                epoch.compared = True
                self._compare(epoch)

        self._watch.harmless(see)

    def _compare(self, epoch: _Epoch) -> None:
        sampler = epoch.sampler() if epoch.sampler is not None else None
        if sampler is None:
            return
        before = self._last.get(sampler)
        if before is not None and before.last <= before.step:
            before = before.before  # nothing was learned in that pass: an evaluation
        epoch.before = before
        if before is not None:
            before.before = None
        self._last[sampler] = epoch
        count = min(len(before.indices), len(epoch.indices)) if before is not None else 0
        if (
            before is None
            or count < FEWEST
            or before.indices[:count] != epoch.indices[:count]
            or not _shuffles(sampler, epoch.indices)
        ):
            return
        how = "set_epoch" if hasattr(sampler, "set_epoch") else "generator"
        epoch.repeats = (how, type(sampler).__name__)

    def _goes_on(self, epoch: _Epoch) -> None:
        """A pass has given a batch, or has ended."""
        if epoch.repeats is not None and epoch.last > epoch.step:  # an evaluation may repeat an order
            (how, what), epoch.repeats = epoch.repeats, None
            self._tell(how, epoch.where, what)

    # --- loaders of Hora ------------------------------------------------------------------------

    def own_starts(self, loader: Loader) -> None:
        """A loader of Hora's starts an epoch. A new loader over the same data starts with the same epoch."""
        order = loader.order
        before = self._own
        self._own = _Own(weakref.ref(loader), order, self._watch.step, self._watch.step)
        if before is None or order is None or before.order != order or before.loader() is loader:
            return
        if before.last > before.step:
            frames = user_frames(1)
            self._own.repeats = f"{frames[0][0]}:{frames[0][1]}" if frames else ""

    def own_goes_on(self) -> None:
        """A loader of Hora's gives a batch."""
        own = self._own
        if own is None:
            return
        own.last = self._watch.step
        if own.repeats is not None and own.last > own.step:  # an evaluation over the same data may repeat it
            where, own.repeats = own.repeats, None
            self._tell("loader", where or None, "hora.data_loader")

    # --- permutations ---------------------------------------------------------------------------

    def _note(self, result: torch.Tensor) -> None:
        frame = sys._getframe(2)  # that which has called torch.randperm

        def note() -> None:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frames = user_frames(1)
            if not frames or f"{frames[0][0]}:{frames[0][1]}" != where:
                return  # drawn by a library, as torch's samplers do
            drawn = self._drawn.setdefault(where, [])
            drawn.append(_Drawn(sample(result), self._watch.step))
            del drawn[:-2]
            self._watch.inputs.open(FOLLOWED)

        if not self._told:
            self._watch.harmless(note)

    def _follow(self, inputs: str | None) -> None:
        """A step was made with these inputs."""
        for where, drawn in self._drawn.items():
            for entry in drawn[-1:]:
                if len(entry.inputs) < FOLLOWED:
                    entry.inputs.append(inputs)
            if len(drawn) == 2 and drawn[0].number == drawn[1].number and drawn[1].step > drawn[0].step:
                first, second = drawn[0].inputs, drawn[1].inputs
                count = min(len(first), len(second))
                steps = drawn[1].step - drawn[0].step
                same = first[:count] == second[:count] and None not in first[:count]
                if count >= min(steps, FOLLOWED) and same and len(set(second[:count])) > 1:
                    self._tell("permutation", where, "torch.randperm")

    def _tell(self, how: str, where: str | None, what: str) -> None:
        if not self._told:
            self._told = True
            self._watch.reporter.send(
                {"kind": "order", "how": how, "where": where, "what": what, "step": self._watch.step}
            )


def _sampler(loader: Any) -> weakref.ref[Any] | None:
    """What puts a loader's samples in order; None: a list, say, which nothing could shuffle anew."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:  # not "or": that of a stream has no length to be judged by
        sampler = getattr(loader, "sampler", None)
    sampler = getattr(sampler, "sampler", sampler)
    try:
        hash(sampler)
        return weakref.ref(sampler)
    except TypeError:
        return None


def _shuffles(sampler: Any, indices: Sequence[Any]) -> bool:
    """Whether a sampler is there to give every epoch an order of its own."""
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, RandomSampler | SubsetRandomSampler):
        return True
    if not hasattr(sampler, "set_epoch") or not all(isinstance(index, int) for index in indices):
        return False
    return any(second < first for first, second in itertools.pairwise(indices))
