"""Where the batches come from, so that runs can be compared sample by sample, and repeated.

An adapter tells of every batch that the script is handed, by a loader or as an argument of its step. Samples
have numbers where a loader gives them, else they are known by a digest of their rows.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hora.adapter.recording.kept import LIMIT, Given, Kept, leaves, mapped
from hora.adapter.recording.prints import digests_of_rows

if TYPE_CHECKING:
    from hora.adapter.recording.recorder import Recorder

__all__ = ["Sources"]


class Sources:
    """Follows the batches of one rank, or replaces them by those of a run that was kept.

    Attributes:
        unused: samples that were handed out and are not trained on, since the last pass or metric.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: list[Given] = []
        self._last = Given([], "seen")
        self._turns: collections.Counter[str] = collections.Counter()
        self._kept = Kept()
        self._bytes = 0
        self.unused = 0
        plan = recorder.plan
        self._shares = "metric-shares" in plan.apply
        self._others: list[Kept] = []
        if plan.replay is not None:
            paths = sorted(plan.replay.glob("rank-*.pickle"), key=lambda path: int(path.stem[5:]))
            self._others = [pickle.loads(path.read_bytes()) for path in paths]

    def handed(
        self,
        place: str,
        batch: Any,
        *,
        native: Callable[[Any, Any], Any],
        samples: Sequence[Any] | None = None,
        alone: bool = False,
    ) -> Any:
        """The script is handed a batch; what it gets instead, which is the same but for a replay.

        Args:
            place: where: a loader, or an argument of a step.
            batch: dicts, lists and tuples of arrays of one first dimension.
            native: makes an array of NumPy one of the script's, like its second argument.
            samples: their numbers, where the loader knows them.
            alone: it is what the next pass is computed from, whatever was handed out before.
        """
        if not self._recorder.active:
            return batch
        turn = self._turns[place]
        self._turns[place] += 1
        names = None if samples is None else [f"{place}:{sample}" for sample in samples]
        parts = self._parts(place, turn, named=names is not None)
        if parts:
            wide = iter([np.concatenate(rows) for rows in zip(*(arrays for _, arrays in parts), strict=True)])
            batch = mapped(lambda leaf: native(next(wide), leaf) if np.ndim(leaf) else leaf, batch)
            names = None if names is None else [name for own, _ in parts for name in own]
        arrays = [np.asarray(leaf) for leaf in leaves(batch) if np.ndim(leaf)]
        content = digests_of_rows(arrays)
        given = Given(content if names is None else names, "cut" if names is None else "loader", [], place)
        if names is not None and len(names) == len(content):
            given.content = content
        if alone:
            self._pending.clear()
        self._pending.append(given)
        self.unused += len(given.samples)
        self._keep(place, turn, given, arrays)
        return batch

    def used(self) -> Given:
        """The batch of this pass: one whose samples have numbers, if there is one, else the first."""
        named = [given for given in self._pending if given.source == "loader"]
        if self._pending:
            self._last = named[-1] if named else self._pending[0]
            if self._last.place:
                self._kept.trained.add(self._last.place)
        self._pending.clear()
        self.unused = 0
        return self._last

    def keys(self, rows: int) -> list[str] | None:
        """Names of the samples of the present batch, if it has so many."""
        given = next((each for each in self._pending if each.source == "loader"), None)
        given = given or next(iter(self._pending), self._last)
        return given.samples if len(given.samples) == rows else None

    def keep(self) -> None:
        """Write what a replay needs."""
        plan = self._recorder.plan
        if plan.keep:
            plan.batches(self._recorder.rank).write_bytes(pickle.dumps(self._kept))

    def _parts(self, place: str, turn: int, *, named: bool) -> list[Any]:
        """What the ranks of the other run were handed here; empty where this run has its own."""
        if not self._others or any(place in kept.trained for kept in self._others) == self._shares:
            return []
        if not named and not self._others[0].differs(self._others[1:], place):
            return []  # the same on all ranks, such as a table
        parts = [kept.batches[place, turn] for kept in self._others if (place, turn) in kept.batches]
        forms = {tuple(array.shape[1:] for array in arrays) for _, arrays in parts}
        return parts if len(forms) == 1 else []

    def _keep(self, place: str, turn: int, given: Given, arrays: list[Any]) -> None:
        if not self._recorder.plan.keep:
            return
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes <= LIMIT:
            self._kept.batches[place, turn] = given.samples, arrays
