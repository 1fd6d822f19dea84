"""Checkpoints that are committed: written in the background by all ranks, whole or not there.

:func:`save` copies the state and returns; :func:`restore` puts the newest good checkpoint back into the
objects. :class:`Checkpoints` is both for a training loop.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hora.core.errors import CheckpointError
from hora.torch._context import Context, required
from hora.torch._edge import expect, step_edge
from hora.torch.checkpoint._save import Policy, Save
from hora.torch.checkpoint._tell import Teller, tell_damaged
from hora.torch.checkpoint._where import directory_of, resume_of

if TYPE_CHECKING:
    from hora.torch.checkpoint._writer import Writer

__all__ = ["Checkpoints", "Save", "restore", "save"]


def save(
    state: Mapping[str, Any],
    step: int,
    *,
    directory: Path | str | None = None,
    keep: int = 3,
    keep_every: int | None = None,
) -> Save:
    """Write a checkpoint in the background; training waits only until the state is copied.

    Every rank calls it at the same step with the same objects. What all ranks hold alike is written once,
    shared out among them; what a rank has of its own (running statistics, random streams, its part of a
    sharded optimizer) it writes itself. A marker with checksums is written last: without it the folder is
    no checkpoint. A checkpoint that cannot be written, as on a full disk, is told as a verdict, and
    training goes on.

    Args:
        state: name -> object: modules, optimizers, other objects with ``state_dict()`` and
            ``load_state_dict()``, ``torch.Generator``, tensors, and plain values. The random streams of
            torch, numpy and Python are always saved beside them. Tensors larger than 1 MiB that are neither
            parameters nor an optimizer's are taken to be equal on all ranks.
        step: optimizer steps that have been made.
        directory: where; None: the setting ``checkpoints``, else ``checkpoints`` in the run directory. All
            hosts must see it.
        keep: how many good checkpoints stay; older ones are removed when a new one is committed.
        keep_every: those of a step that this divides stay for ever.

    Returns:
        A handle. Nobody has to wait for it.

    Raises:
        CheckpointError: an object that a checkpoint cannot hold, ranks at different steps, no directory, or
            one that another run writes to.
    """
    context = required("save")
    return _writer_of(context, directory_of(context, directory)).save(
        state, step, Policy(keep=keep, keep_every=keep_every)
    )


def restore(state: Any, *, directory: Path | str | None = None) -> int | None:
    """Put the newest good checkpoint into the objects, in place. Every rank calls it.

    Every file is verified first. Checkpoints that are torn, truncated, altered or not completed are named,
    and passed over. Any number of workers can read what any other has written, with and without ``shard``.
    Each rank gets its own random streams back; on another number of workers it begins new ones, a function
    of the saved stream, the step and the rank.

    Args:
        state: as it was given to :func:`save`; plain values are replaced in it.
        directory: as in :func:`save`. Where there is no checkpoint, the setting ``resume`` is looked into.

    Returns:
        The step of the checkpoint; None: there is none, and the objects are as they were.

    Raises:
        CheckpointError: the objects are not those that were saved, or all checkpoints are damaged.
    """
    from hora.torch.checkpoint import _restore  # torch's checkpoints take a third of a second to import

    context = required("restore")
    own = directory_of(context, directory)
    writer = _writer_of(context, own)
    resume = resume_of(context)
    for place in (own, resume):
        if place is None:
            continue
        found = _restore.newest(place, context, lambda one, why: tell_damaged(context, one, why))
        if place == own:
            writer.damaged |= set(found.damaged)
        if found.place is not None and found.commit is not None:
            _restore.put_back(state, found.place, found.commit, context)
            return found.place.step
        if found.damaged:
            first, why = next(iter(found.damaged.items()))
            raise CheckpointError(
                f"None of the {len(found.damaged)} checkpoints in {place} is whole: of {first.name}, {why}.",
                fix="Restore them from elsewhere; or, to begin anew, move them away.",
            )
    if resume is not None:
        raise CheckpointError(
            f"HORA_RESUME={resume}: there is no checkpoint.",
            fix="Give the directory of a run that has written one: `hora checkpoint list DIR` tells.",
        )
    return None


class Checkpoints:
    """Saves every so many steps, restores at the start, and stops when the job is asked to.

    SIGTERM and SIGUSR1, which schedulers send before they take a machine away, make all ranks save at the
    same step edge and end with exit code 75.

    ::

        checkpoints = hora.Checkpoints({"model": model, "optimizer": opt, "loader": loader}, every=500)
        checkpoints.restore()
        for x, y in hora.track(loader, epochs=10):
            ...
            opt.step()
            checkpoints.step()

    Args:
        state: see :func:`save`.
        every: steps between checkpoints; None: only by :meth:`save`, and before a stop.
        keep: see :func:`save`.
        keep_every: see :func:`save`.
        directory: see :func:`save`.

    Attributes:
        steps: steps made, those before a restore included.
        last: the newest save of this object; None before the first.

    Raises:
        CheckpointError: ``every`` or ``keep`` below 1, no directory, or one that another run writes to.
        RunDirectoryError: the directory cannot be written.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        every: int | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        directory: Path | str | None = None,
    ) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise CheckpointError(f"every={every!r} is not a number of steps.", fix="Write every=500.")
        Policy(keep=keep, keep_every=keep_every).check()
        self.steps = 0
        self._state = state
        self._every, self._keep, self._keep_every = every, keep, keep_every
        context = required("Checkpoints")
        self._directory = directory_of(context, directory)
        self._saved: int | None = None
        self.last: Save | None = None
        expect(self)
        self._have = False  # one that was committed, or restored
        # A worker that comes to an elastic job later is in no world yet: others have the directory.
        if context.member is None or not context.member.alone:
            _writer_of(context, self._directory).claim()

    def state_dict(self) -> dict[str, Any]:
        """The steps made, for the state of an elastic job: ``TorchState(checkpoints=checkpoints)``."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there; checkpoints that were written stay."""
        self.steps = state["steps"]

    def restore(self) -> int | None:
        """Put the newest good checkpoint into the objects; its step, or None if there is none."""
        step = restore(self._state, directory=self._directory)
        self.steps, self._saved, self._have = step or 0, step, step is not None
        _repeat_from(self.steps)
        return step

    def step(self) -> None:
        """A step has been made: save if it is time to. If the job is asked to stop, save, and stop here.

        Every rank calls it after each step; with ``hora.join()``, only where no rank has joined. From the
        first call on SIGTERM and SIGUSR1 are waited for.

        Raises:
            StopForNow: a ``SystemExit`` with code 75: the job was asked to stop, and the state is saved.
            CheckpointError: it was asked to, and neither this checkpoint nor one before could be written.
        """
        self.steps += 1
        edge = step_edge()
        if edge.asked():
            self._save_at_last()
            edge.stop(self.steps)
        if self._every is not None and self.steps % self._every == 0:
            self.save()

    def save(self) -> Save:
        """Save now."""
        self._have |= _committed(self.last)
        self._saved = self.steps
        self.last = save(
            self._state, self.steps, directory=self._directory, keep=self._keep, keep_every=self._keep_every
        )
        return self.last

    def _save_at_last(self) -> None:
        before = self.last
        newest = self.save() if before is None or self._saved != self.steps else before
        try:
            newest.wait()
        except CheckpointError:
            if not (self._have or _committed(before)):
                raise
            # A verdict has told of it by now. What was saved before is what the next run goes on from.


def _committed(save: Save | None) -> bool:
    return save is not None and save.done and save.error is None


def _repeat_from(step: int) -> None:
    """After a restart (``hora run --restarts``) steps are repeated: what was logged of them goes.

    Only once, when the training begins: a script may restore at its end too, such as the best checkpoint.
    """
    context = required("restore")
    if (context.settings.attempt or 1) == 1 or context in _repeated:
        return
    if context.member is not None and context.member.alone:
        return  # others are in the midst of the training
    _repeated.add(context)
    if context.run is not None and context.world.rank == 0:
        context.run.rewind_metrics(step)


_repeated: weakref.WeakSet[Context] = weakref.WeakSet()
_writers: dict[Path, Writer] = {}


def _writer_of(context: Context, directory: Path) -> Writer:
    found = _writers.get(directory)
    if found is None or found.context is not context:
        from hora.torch.checkpoint._writer import Writer

        found = _writers[directory] = Writer(context, directory, Teller(context))
        context.closing.append(lambda: _close(context, directory))
    return found


def _close(context: Context, directory: Path) -> None:
    failing = bool(context.pending) or getattr(sys, "last_value", None) is not None
    if context.member is not None and context.member.control.reset_due() is not None:
        failing = True  # a worker is lost, and may never say what it has written
    _writers.pop(directory).close(failing=failing)
