"""Writes down, step by step, what a training on this rank did; ``hora verify`` compares such records.

The script is not changed: the adapters look on through hooks of their frameworks, and tell this module of
passes and steps. ``hora.torch``, which needs more of them, has a recorder of its own.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import numpy as np
from numpy.typing import NDArray

from hora.adapter import current
from hora.adapter.frames import line
from hora.adapter.recording.draws import Draws
from hora.adapter.recording.metrics import Metrics
from hora.adapter.recording.prints import fingerprint, norm_of, together, unfounded
from hora.adapter.recording.sources import Sources
from hora.core.errors import VerifyError
from hora.core.recording import Batch, Ending, Plan, Step, as_line
from hora.core.settings import load

__all__ = ["Recorder", "recorder"]

Arrays = Mapping[str, NDArray[Any]]


class Recorder:
    """The record of this rank.

    Attributes:
        plan: what is to be recorded and changed.
        rank: of this worker.
        size: of the job.
        module: the adapter whose training is recorded: the one that the script has imported.
        steps: steps that have ended.
        passes: passes since the last step.
        uses: what was seen at work since the last step.
        raw: gradients as this rank's passes made them, by what tells their parameters apart; empty where
            nobody could see them.
        in_step: whether a train step of a library is running, which tells of its passes itself.
        saves: what is left out, so that no checkpoint of the user's is overwritten.
        elsewhere: whether the recorder of ``hora.torch`` is there, for scripts that train by that.
    """

    def __init__(self, plan: Plan, *, rank: int, size: int) -> None:
        self.plan, self.rank, self.size = plan, rank, size
        self.apply = frozenset(plan.apply)
        self.module = ""
        self.steps = self.passes = 0
        self.uses: set[str] = set()
        self.raw: dict[Any, NDArray[Any]] = {}
        self.in_step = False
        self.saves = ""
        self.sources = Sources(self)
        self.metrics = Metrics(self)
        self.draws = Draws(self)
        self._batches: list[Batch] = []
        self._optimizers: dict[int, tuple[int, object]] = {}
        self._dtypes: set[str] = set()
        self._where = ""
        self._unsaved = 0
        self.elsewhere = False
        self._file: TextIO | None = None
        self._pid = os.getpid()
        self._ended = self._stopping = False

    def start(self) -> None:
        """Seed the generators; called once, before the script."""
        # What a script leaves to chance would differ from run to run; between ranks it still differs.
        random.seed(self.rank)
        np.random.seed(self.rank)
        atexit.register(self._finish, "finished")

    @property
    def active(self) -> bool:
        """Whether this is the rank itself, rather than a process that it has forked, and not at its end."""
        return os.getpid() == self._pid and not self._ended

    def in_charge(self, module: str) -> bool:
        """Whether it is the training of this adapter that is recorded."""
        if self.module:
            return self.module == module
        joined = current.in_use()
        return not joined or module in joined

    def take_charge(self, module: str) -> None:
        """The script trains by this adapter."""
        self.module = module

    # --- passes and steps -----------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Gradients are about to be computed, or used: end the script here if it has done enough."""
        if not current.in_use():
            self.stop("no-init")
        if self.steps >= self.plan.steps:
            self.stop("stopped")

    def end_pass(self, loss: float | None = None, *, counts: Sequence[float] | None = None) -> None:
        """Gradients of one batch are there.

        Args:
            loss: its value.
            counts: what each mean in the loss was divided by; None: the batch's samples.
        """
        given = self.sources.used()
        rows = len(given.samples)
        self._batches.append(
            Batch(
                samples=given.samples,
                source=given.source,
                content=given.content,
                rows=rows,
                loss=loss,
                counts=[float(rows)] if counts is None else list(counts),
            )
        )
        self.metrics.trained(rows)
        self.passes += 1

    def add_raw(self, key: Any, gradient: NDArray[Any]) -> None:
        """A pass has made this gradient."""
        self.raw[key] = self.raw[key] + gradient if key in self.raw else gradient

    def number_of(self, optimizer: object) -> int:
        """Which optimizer this is, in the order of their first steps."""
        return self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))[0]

    def step(
        self,
        *,
        optimizer: object,
        rates: Sequence[float],
        gradients: Arrays,
        before: Arrays,
        parameters: Arrays,
        buffers: Arrays,
    ) -> None:
        """An optimizer has made a step.

        Args:
            optimizer: anything that tells it from others.
            rates: learning rates that it used.
            gradients: by parameter, as it used them; those without one are left out.
            before: parameters before the step.
            parameters: after it.
            buffers: numbers of the model that are no parameters.
        """
        if not self.passes:  # its gradients were made where nobody looks
            self.end_pass()
        first = id(optimizer) not in self._optimizers
        number = self.number_of(optimizer)
        if not self._where:
            self._where = line()
        norm = together(map(norm_of, gradients.values()))
        self._write(
            Step(
                optimizer=number,
                rates=list(rates),
                batches=self._batches,
                gradients={name: fingerprint(value) for name, value in gradients.items()},
                norm=norm,
                raw_norm=together(map(norm_of, self.raw.values())) if self.raw else norm,
                parameters={name: fingerprint(value) for name, value in parameters.items()},
                buffers={name: fingerprint(value) for name, value in buffers.items()},
                noise={
                    name: unfounded(before[name], parameters[name], value, norm)
                    for name, value in gradients.items()
                    if name in before and name in parameters
                },
                before={name: fingerprint(value) for name, value in before.items()} if first else {},
                sizes={name: value.size for name, value in (*parameters.items(), *buffers.items())}
                if first
                else {},
                metrics=self.metrics.take(),
                uses=sorted(self.uses),
            )
        )
        self._dtypes |= {str(value.dtype) for value in parameters.values()}
        self._batches = []
        self.uses.clear()
        self.raw.clear()
        self.steps += 1
        self.passes = 0

    # --- what experiments change ----------------------------------------------------------------

    def rate(self, own: float, place: int = 0) -> float:
        """The learning rate to use in this step, where the script's is ``own``."""
        if "learning-rate" in self.apply and self.steps < len(self.plan.rates):
            return self.plan.rates[self.steps][place]
        return own * self.plan.factor

    def weight(self) -> float:
        """How much the gradient of this rank's only pass of the step is to count ("weighting")."""
        if "weighting" not in self.apply:
            return 1.0
        try:
            [[weight]] = self.plan.weights[self.rank][self.steps]
        except (IndexError, ValueError):  # behind what the first run has recorded, or several passes
            return 1.0
        return weight

    def factor(self) -> float:
        """By what the gradients are to be multiplied before they are used."""
        if self.size == 1:
            return 1.0
        return (
            1 / self.size if "summed" in self.apply else self.size if "once-averaged" in self.apply else 1.0
        )

    @property
    def averages(self) -> bool:
        """Whether the gradients are to be averaged before they are used."""
        return self.size > 1 and bool(self.apply & {"averaging", "unclipped"})

    @property
    def unclipped(self) -> bool:
        """Whether gradients are to be used as the passes made them."""
        return "unclipped" in self.apply

    def first_parameters(self, given: Sequence[NDArray[Any]], number: int = 0) -> list[NDArray[Any]] | None:
        """What a model with these parameters is to start from; None: from these.

        Args:
            given: what the script has made.
            number: which model of several it is, in the order of their first use.
        """
        if "initial-parameters" not in self.apply or self.plan.initial is None:
            return None
        path = self.plan.initial.with_name(f"{self.plan.initial.name}-{number}.npz")
        if self.size == 1:
            np.savez(path, *given)
            return None
        with np.load(path) as kept:
            return [kept[f"arr_{place}"] for place in range(len(kept.files))]

    # --- the end --------------------------------------------------------------------------------

    def refuse(self, what: str, fix: str) -> NoReturn:
        """Raise VerifyError for a training that cannot be followed, which is not to pass for equal."""
        self._ended = True
        raise VerifyError(what, fix=fix)

    def stop(self, why: str) -> NoReturn:
        """End the script here, on every rank at the same place."""
        self._finish(why)
        if self._stopping:  # an `except:` or `finally:` of the script has gone on training
            sys.stdout.flush()
            os._exit(0)
        self._stopping = True
        raise SystemExit(0)

    def leave_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes a model, as one that does not."""

        def save(*args: Any, **kwargs: Any) -> Any:
            if not self.active and not self._ended:
                return original(*args, **kwargs)
            self._unsaved += 1
            return None

        return save

    def _finish(self, why: str) -> None:
        if not self.active or (self.elsewhere and not self.module):
            return
        if why == "finished" and not self.steps and not current.were_used():
            why = "no-init"
        self._ended = True
        self._write(
            Ending(
                why=why,
                metrics=self.metrics.take(),
                dtypes=sorted(self._dtypes),
                unsaved=self._unsaved,
                batches=len(self._batches),
                where=self._where,
                module=self.module,
                saves=self.saves,
            )
        )
        self.sources.keep()

    def _write(self, row: Step | Ending) -> None:
        if self._file is None:
            self._file = self.plan.lines(self.rank).open("w", encoding="utf-8", buffering=1)
        self._file.write(as_line(row))


_one: Recorder | None = None


def recorder() -> Recorder:
    """The recorder of this process, made from what the launcher says."""
    global _one
    if _one is None:
        settings = load()
        if settings.verify is None:
            raise VerifyError("This process is no rank of hora verify.", fix="Run: hora verify -n 2 train.py")
        _one = Recorder(Plan.read(settings.verify), rank=settings.rank or 0, size=settings.size or 1)
        _one.start()
    return _one
