"""One training of one model by several ranks: what the guard compares of it.

An adapter makes one for each set of variables that the ranks' gradients train, and tells it what it sees:
fingerprints of the variables now and then, in the first steps what the model was fed, and in every step the
sums of this rank's own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hora.adapter import records
from hora.adapter.prints import MOST, combined, is_due
from hora.adapter.watch import EARLY, Watch, here

__all__ = ["Training", "fault", "found", "scan", "totals"]


class Training:
    """A training.

    Args:
        watch: that of the job.
        kind: of what it is, as in ``gradients``; part of its key.
        members: the ranks that take part.
        names: of the parameters.
        optimizer: what steps, for messages.
        where: the user's line that made it.

    Attributes:
        key: the same for the same training on all ranks.
        steps: steps made.
        passes: steps of which the gradients were seen.
        begun: whether the first fingerprints have been sent.
    """

    def __init__(
        self,
        watch: Watch,
        kind: str,
        *,
        members: Sequence[int],
        names: Sequence[str],
        optimizer: str = "",
        where: str | None = None,
        shapes: Sequence[Any] = (),
    ) -> None:
        signature = blake2b(repr(list(map(str, shapes))).encode(), digest_size=6).hexdigest()
        mark = f"{kind} {signature} {list(members)}"
        number = watch.numbers[mark] = watch.numbers.get(mark, 0) + 1
        self.key = f"{watch.generation} {mark} {number}"
        self.members = list(members)
        self.names = list(names)
        self.optimizer = optimizer
        self.where = here() if where is None else where
        self.steps = 0
        self.passes = 0
        self.begun = False
        self._watch = watch
        self._seen = watch.used
        watch.looks = EARLY
        self._bad = False

    # --- fingerprints ---------------------------------------------------------------------------

    def begin(
        self, parameters: Sequence[int], *, state: Sequence[int] = (), rates: Sequence[Any] = ()
    ) -> None:
        """Before the first step: fingerprints of the parameters, and of the optimizer's state."""
        self.begun = True
        if len(self.members) < 2:
            return
        self._watch.reporter.send(
            records.replica(
                key=self.key,
                members=self.members,
                names=self.names[:MOST],
                optimizer=self.optimizer,
                where=self.where,
                parameters=parameters,
                state=state,
                rates=rates,
            )
        )

    def print(
        self,
        parameters: Sequence[int],
        *,
        step: int | None = None,
        state: Sequence[int] = (),
        rates: Sequence[Any] = (),
    ) -> None:
        """After a step: the same."""
        self._watch.reporter.send(
            records.snapshot(
                key=self.key,
                step=self.steps if step is None else step,
                parameters=parameters,
                state=state,
                rates=rates,
            )
        )

    @property
    def is_due(self) -> bool:
        """Whether fingerprints are wanted after the steps made so far."""
        return len(self.members) > 1 and is_due(self.steps)

    # --- steps ----------------------------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        """Whether it is reported what the model is fed."""
        return len(self.members) > 1 and self.passes < EARLY

    def fed(
        self,
        *,
        local: Sequence[float] | None,
        inputs: Sequence[int] | None = None,
        step: int | None = None,
    ) -> None:
        """Before a step: the sums of this rank's own gradients, and numbers for what the model was fed.

        Args:
            local: the sums; None: nobody sees them.
            inputs: the numbers; None: what loaders have handed out since the last step.
            step: which; None: the next.
        """
        self.passes = self.passes + 1 if step is None else step
        if self.passes > EARLY or len(self.members) < 2:
            return
        watch = self._watch
        if inputs is None:
            inputs = [number for serial, number in watch.handed if serial > self._seen]
            self._seen = watch.serial
        watch.reporter.send(
            records.fed(
                key=self.key,
                members=self.members,
                step=self.passes,
                where=self.where,
                local=None if local is None else combined(local),
                inputs=combined(inputs) if inputs else None,
                states=watch.states,
                generator="keras" if watch.states else None,
            )
        )

    def averages(
        self,
        sums: Sequence[float],
        named: Iterable[tuple[str, Callable[[], NDArray[Any]]]],
        *,
        where: str | None,
    ) -> None:
        """This rank's own gradients are about to be averaged.

        Args:
            sums: of them, by :func:`totals`.
            named: the names of their parameters, and how to read each; nothing where they may overflow.
            where: the user's line.
        """
        self.fed(local=sums)
        if not all(map(math.isfinite, sums)):
            self.not_finite(scan(named), step=self.steps + 1, where=where)

    def stepped(self, count: int = 1) -> None:
        """So many steps more are done."""
        self.steps += count
        self._watch.stepped(self.steps)

    def not_finite(
        self, found: Mapping[str, Any] | None, *, step: int, where: str | None, own: bool = True
    ) -> None:
        """A step was made with gradients that are not finite; the first is told.

        Args:
            found: what :func:`scan` has found; None: nothing.
            step: which.
            where: the line that made them.
            own: whether they are this rank's own, not yet averaged.
        """
        if found is None or self._bad:
            return
        self._bad = True
        bad = {"loss": None, "order": step, "where": where, **found}
        self._watch.reporter.send(
            records.not_finite(
                key=self.key, members=self.members, own=own, step=step, where=self.where, bad=bad
            )
        )


def totals(arrays: Iterable[NDArray[Any]]) -> list[float]:
    """The sum of each array: not finite if an element is not, and equal for equal bits."""
    with np.errstate(all="ignore"):
        return [
            float(np.sum(each.real if each.dtype.kind == "c" else each, dtype=_wide(each))) for each in arrays
        ]


def scan(named: Iterable[tuple[str, Callable[[], NDArray[Any]]]]) -> dict[str, Any] | None:
    """The parameters whose gradient is not finite; None if there are none: the sum alone was too large."""
    wrong = []
    for name, read in named:
        array = np.asarray(read())
        values = array if array.dtype.kind == "c" else array.astype(np.float64)
        if not np.isfinite(values).all():
            wrong.append((name, "nan" if np.isnan(values).any() else "inf"))
    return found(wrong)


def found(wrong: Sequence[tuple[str, str]]) -> dict[str, Any] | None:
    """The names of what is not finite and how, as a record has it."""
    if not wrong:
        return None
    return {"names": [name for name, _ in wrong[:5]], "count": len(wrong), "value": wrong[0][1]}


def fault(value: float) -> str | None:
    """What is wrong with a number: ``nan`` or ``inf``; None: nothing."""
    return "nan" if math.isnan(value) else "inf" if math.isinf(value) else None


def _real(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def _wide(array: NDArray[Any]) -> Any:
    return np.float32 if array.dtype.itemsize < 4 else None
