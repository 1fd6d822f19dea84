"""Where the batches of a script come from: what each held, and how another run's batches take their place.

Three kinds of source are followed: Hora's loader and ``torch.utils.data.DataLoader``, whose samples have
numbers, and tensors that the script cuts out or makes itself, whose rows are known by a digest.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import fetch as torch_fetch

from hora.adapter.order import epoch_order, share
from hora.torch import _loader
from hora.torch._fetch import _Seeded, to_device
from hora.torch.verify._intervene_random import keyed_samples
from hora.torch.verify._record_kept import Given, Kept, Passage, copied, joined, places_that_differ, union
from hora.torch.verify._record_prints import first_tensor, row_digests, tensors

if TYPE_CHECKING:
    from hora.torch.verify._record import Recorder

__all__ = ["Sources", "user_place"]

LIMIT = 2**28
"""Bytes of cut-out tensors that a rank keeps for a replay."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Sources:
    """Follows the batches of one rank, or replaces them by those of a run that was kept."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._given: list[Given] = []
        self._last: Given | None = None
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._kept = Kept()
        self._bytes = 0
        self._turns: collections.Counter[str] = collections.Counter()
        self._loading = 0
        plan = recorder.plan
        self._shares = "metric-shares" in plan.apply
        self._other: list[Kept] = []
        if plan.replay is not None:
            paths = sorted(plan.replay.glob("rank-*.pickle"), key=lambda path: int(path.stem[5:]))
            self._other = [pickle.loads(path.read_bytes()) for path in paths]
        self._per_rank = places_that_differ(self._other)

    def start(self) -> None:
        """Follow all loaders from now on."""
        owner: Any = _loader.Loader
        owner._batches = self._hora_batches(owner._batches)
        base: Any = torch_loader._BaseDataLoaderIter
        base._next_index = self._next_index(base._next_index)
        base._reset = self._reset(base._reset)
        base.__next__ = self._next(base.__next__)
        loader: Any = DataLoader
        loader.__iter__ = self._iter(loader.__iter__)
        torch.from_numpy = self._from_numpy(torch.from_numpy)
        if "randomness" in self._recorder.plan.apply:
            keyed_samples(torch_fetch)

    # --- what the recorder asks -----------------------------------------------------------------

    def given(self, rows: Sequence[str]) -> Given:
        """The batch of this backward pass, whose first module was called with these rows."""
        named = [given for given in self._given if given.loader is not None]
        alike = [given for given in self._given if len(given.samples) == len(rows)]
        if named or alike:
            self._last = named[-1] if named else alike[0]
        elif rows:
            self._last = Given(list(rows), "seen")
        else:
            return Given([], "seen")
        return self._last

    def trained(self) -> None:
        """A backward pass has begun: what was given so far is used up."""
        self._kept.trained |= {given.loader for given in self._given if given.loader is not None}
        self._given.clear()

    def forget(self) -> None:
        """What was given is for an evaluation."""
        self._given.clear()

    def rows(self, rows: int) -> int:
        """Samples of an evaluation batch: as many as its loader gave, else the rows of the model's input."""
        named = [given for given in self._given if given.source == "loader"]
        return len(named[-1].samples) if named else rows

    def keys(self, rows: int) -> list[str] | None:
        """Names of the samples of the present batch, if it has so many."""
        fitting = [given for given in self._given if len(given.samples) == rows]
        return fitting[0].samples if fitting else None

    @property
    def pending(self) -> bool:
        """Whether a batch was given since the last backward pass."""
        return bool(self._given)

    def new_step(self) -> None:
        self._turns.clear()

    def keep(self) -> None:
        """Write what a replay needs."""
        plan = self._recorder.plan
        if plan.keep:
            plan.batches(self._recorder.rank).write_bytes(pickle.dumps(self._kept))

    def _give(self, given: Given) -> None:
        self._given.append(given)
        self._recorder.mark_random()
        self._recorder.watch.batch_given()

    # --- tensors that the script cuts out -------------------------------------------------------

    def cut(self, result: Any) -> Any:
        """A tensor that the script has cut out of a larger one, or made: perhaps its batch."""
        recorder = self._recorder
        if (
            not isinstance(result, torch.Tensor)
            or not result.dim()
            or result.requires_grad
            or recorder.depth
            or self._loading
            or not recorder.active
            or not torch.is_grad_enabled()
        ):
            return result
        place = user_place()
        if place is None:
            return result
        with torch._C.DisableTorchFunction():
            turn = self._turns[place]
            self._turns[place] += 1
            key = (recorder.steps, place, turn)
            if self._other and not self._shares and place in self._per_rank:
                parts = [kept.cuts[key] for kept in self._other if key in kept.cuts]
                if parts and all(part.shape[1:] == parts[0].shape[1:] for part in parts):
                    wide = result.dtype if result.is_floating_point() else parts[0].dtype
                    result = torch.cat(parts).to(result.device, wide)
            self._give(Given(row_digests(result), "cut"))
            if recorder.plan.keep:
                self._bytes += result.numel() * result.element_size()
                if self._bytes <= LIMIT:
                    self._kept.cuts[key] = result.detach().cpu().clone()
        return result

    def _from_numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_numpy(array: Any) -> Any:
            return self.cut(original(array))

        return from_numpy

    # --- torch's loader -------------------------------------------------------------------------

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            if not self._recorder.active or isinstance(loader.dataset, _Seeded):
                return original(loader)
            number, passage, recorded = self._open(loader)
            if recorded is not None and any(there.values for there in recorded):
                return self._replayed_values(number, recorded)
            if recorded is not None and loader.batch_sampler is not None:
                return self._replayed(loader, number, recorded)
            with self._busy():
                iterator = original(loader)
            iterator._hora_passage = (number, passage)
            return iterator

        return iterate

    def _next_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_index(iterator: Any) -> Any:
            index = original(iterator)
            vars(iterator).setdefault("_hora_indices", collections.deque()).append(index)
            return index

        return next_index

    def _reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            vars(iterator)["_hora_indices"] = collections.deque()
            return original(iterator, *args, **kwargs)

        return reset

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def following(iterator: Any) -> Any:
            opened = getattr(iterator, "_hora_passage", None)
            if opened is None or not self._recorder.active:
                return original(iterator)
            number, passage = opened
            try:
                with self._busy():
                    batch = original(iterator)
            except StopIteration:
                passage.whole = True
                raise
            index = iterator._hora_indices.popleft()
            samples = index if isinstance(index, list) else [index]
            if any(sample is None for sample in samples):  # an iterable data set has no numbers
                self._keep_value(passage, batch)
                self._give(Given(_rows(batch), "cut", loader=number))
                return batch
            passage.batches.append(list(samples))
            self._named(batch, samples, number)
            return batch

        return following

    def _keep_value(self, passage: Passage, batch: Any) -> None:
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors(batch))
        if self._recorder.plan.keep and self._bytes <= LIMIT:
            passage.values.append(copied(batch))

    def _replayed_values(self, number: int, recorded: list[Passage]) -> Iterator[Any]:
        for index in range(max(len(passage.values) for passage in recorded)):
            parts = [passage.values[index] for passage in recorded if index < len(passage.values)]
            batch = joined(parts)
            self._give(Given(_rows(batch), "cut", loader=number))
            yield batch

    def _replayed(self, loader: Any, number: int, recorded: list[Passage]) -> Iterator[Any]:
        kind: Any = torch_loader._DatasetKind
        fetcher = kind.create_fetcher(loader._dataset_kind, loader.dataset, True, loader.collate_fn, False)
        for samples, _ in union(recorded):
            with self._busy():
                batch = fetcher.fetch(samples)
            self._named(batch, samples, number)
            yield batch

    # --- Hora's loader --------------------------------------------------------------------------

    def _hora_batches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batches(loader: Any, serial: int, rank: int, size: int, device: torch.device) -> Iterator[Any]:
            number, passage, recorded = self._open(loader)
            if recorded is not None:
                yield from self._hora_replayed(loader, number, recorded, device)
                return
            steps = loader._steps(loader._consumed)
            order = epoch_order(
                loader.samples, seed=loader._seed, epoch=loader._epoch, shuffle=loader._shuffle
            )
            inner = original(loader, serial, rank, size, device)
            for step in steps:
                with self._busy():
                    batch = next(inner)
                first, last = share(step.start, step.stop, rank=rank, size=size)
                samples = order[np.arange(first, last) % len(order)].tolist()
                passage.batches.append(samples)
                passage.spans.append((step.start, step.stop))
                self._named(batch, samples, number)
                yield batch
            passage.whole = True
            next(inner, None)  # it notes that the epoch has ended

        return batches

    def _hora_replayed(
        self, loader: Any, number: int, recorded: list[Passage], device: torch.device
    ) -> Iterator[Any]:
        for samples, start in union(recorded):
            stop = start + len(samples)
            # At the places that they had: what is random inside a sample is seeded by its place.
            order = np.zeros(max(stop, loader.samples), dtype=np.int64)
            order[start:stop] = samples
            with self._busy():
                fetched = loader._fetcher.fetch(
                    order, [(start, stop)], seed=loader._seed, epoch=loader._epoch
                )
                batch = to_device(next(fetched), device)
            loader._current = len(samples)
            loader._consumed, loader._inside = min(stop, loader.samples), True
            self._named(batch, samples, number)
            yield batch
        loader._consumed, loader._inside = loader.samples, False

    # --- both -----------------------------------------------------------------------------------

    def _open(self, loader: Any) -> tuple[int, Passage, list[Passage] | None]:
        """The number of the loader, a new passage, and the passages that a replay puts in its place."""
        number = self._numbers.setdefault(loader, len(self._numbers))
        passages = self._kept.passages.setdefault(number, [])
        turn = len(passages)
        passages.append(Passage())
        trained = any(number in kept.trained for kept in self._other)
        if not self._other or trained == self._shares:
            return number, passages[-1], None
        found = [kept.passages.get(number, []) for kept in self._other]
        if any(turn >= len(passages_there) for passages_there in found):
            return number, passages[-1], None
        return number, passages[-1], [passages_there[turn] for passages_there in found]

    def _named(self, batch: Any, samples: Sequence[Any], number: int) -> None:
        rows = _rows(batch)
        content = rows if len(rows) == len(samples) else []
        self._give(Given([f"{number}:{sample}" for sample in samples], "loader", content, number))

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1


def _rows(batch: Any) -> list[str]:
    with torch._C.DisableTorchFunction():
        tensor = first_tensor(batch)
        return row_digests(tensor) if tensor is not None else []


def user_place() -> str | None:
    """``file:line`` of the caller of a function of PyTorch, if that is the script and no library."""
    frame: Any = sys._getframe(2)
    own = (str(Path(__file__).parent / "_record"), str(Path(__file__).parent / "_intervene"))
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_LIBRARIES):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
