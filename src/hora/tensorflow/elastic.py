"""Trainings that go on after a worker's end: commits, and workers that are all started anew.

TensorFlow's runtime keeps the ranks that it began with, so a job does not change its workers while it runs.
Instead rank 0 writes each commit to the run directory, and ``hora run --restarts N`` starts all workers again
when one has ended: :func:`run` then begins with the last commit, which is valid with any number of workers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hora.adapter import stored
from hora.core.errors import CheckpointError, UsageError
from hora.tensorflow._context import current, required
from hora.tensorflow._objects import broadcast_object
from hora.tensorflow._variables import _value, broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function begin with the last commit.

    Args:
        function: takes the state, and what else the caller gives.

    Returns:
        The function to call; it returns what ``function`` returns.
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        if (required("elastic").settings.attempt or 1) > 1:
            state.on_reset()
        return function(state, *args, **kwargs)

    return elastic


class State:
    """The form of a state; derive from it for what :class:`TensorFlowKerasState` cannot hold.

    A subclass has ``save()``, ``restore()`` and ``sync()``.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these when the workers have been started anew, before the training goes on."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The workers have been started anew."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Nothing: a job of TensorFlow keeps its workers while it runs."""

    def commit(self) -> None:
        """Keep the state as it is now, on disk too where there is a run directory. Every rank calls it."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing: a job of TensorFlow keeps its workers while it runs."""

    def reset(self) -> None:
        """The workers have changed; for subclasses."""

    def save(self) -> None:
        """Keep a copy of the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0, which is that of the last commit."""
        raise NotImplementedError


class ObjectState(State):
    """A state of plain values such as JSON takes, which are its attributes.

    Args:
        bcast_object: accepted for scripts that give Horovod's function; Hora's is used.
        get_rank: likewise.
        kwargs: names and values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__()
        for name in kwargs:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(
                    f"A state cannot have a value named {name!r}: that is one of its own.",
                    fix="Give it another name.",
                )
        self.__dict__.update(kwargs)
        self._names = list(kwargs)
        self._saved = copy.deepcopy(kwargs)
        self._commits = 0

    def save(self) -> None:
        """Keep a copy of the values; rank 0 writes it."""
        self._keep()
        self._commits += 1
        folder = stored.folder_of(required("elastic").run) if current.is_initialized() else None
        if folder is not None and current.rank() == 0:
            stored.write(
                folder,
                count=self._commits,
                world=current.size(),
                values=self._saved,
                arrays=self._committed_arrays(),
            )

    def restore(self) -> None:
        """The values of the last copy."""
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Rank 0's values, on all ranks: those of the last commit after a restart."""
        context = required("elastic")
        folder = stored.folder_of(context.run)
        again = (context.settings.attempt or 1) > 1
        found = stored.newest(folder) if folder is not None and again and context.world.rank == 0 else None
        if found is not None:
            self._commits = found.commits
            self._take(found)
        values = broadcast_object({name: getattr(self, name) for name in self._names}, 0)
        self.__dict__.update(values)
        self._keep()

    def _keep(self) -> None:
        self._saved = copy.deepcopy({name: getattr(self, name) for name in self._names})

    def _committed_arrays(self) -> list[Any]:
        return []

    def _take(self, committed: stored.Stored) -> None:
        self.__dict__.update(committed.values)


class TensorFlowState(ObjectState):
    """The state of a training: variables, and plain values by name.

    Args:
        variables: of a model and an optimizer, in the same order on all ranks.
        session: of TensorFlow 1; refused.
        kwargs: names and values.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._variables = list(variables or ())
        self._arrays: list[Any] = []
        self._keep_variables()

    def save(self) -> None:
        """Keep a copy of variables and values; rank 0 writes it."""
        self._keep_variables()
        super().save()

    def restore(self) -> None:
        """Variables and values of the last copy."""
        for variable, array in zip(self._held(), self._arrays, strict=False):
            variable.assign(array)
        super().restore()

    def sync(self) -> None:
        """Rank 0's variables and values, on all ranks: those of the last commit after a restart."""
        super().sync()
        broadcast_variables(self._held(), 0)
        self._keep_variables()

    def _held(self) -> list[Any]:
        return self._variables

    def _keep_variables(self) -> None:
        self._arrays = [np.array(_value(variable).numpy()) for variable in self._held()]

    def _committed_arrays(self) -> list[Any]:
        return self._arrays

    def _take(self, committed: stored.Stored) -> None:
        super()._take(committed)
        arrays, held = committed.arrays, self._held()
        if [array.shape for array in arrays] != [tuple(variable.shape) for variable in held]:
            raise CheckpointError(
                f"The last commit of this run holds {len(arrays)} variables of other shapes than the "
                f"{len(held)} here.",
                fix="Build the same model and optimizer as before, or start a new run directory.",
            )
        for variable, array in zip(held, arrays, strict=True):
            variable.assign(array)


class TensorFlowKerasState(TensorFlowState):
    """The state of a training with Keras: a model, its optimizer, and plain values by name.

    Args:
        model: built, so that its variables exist.
        optimizer: None: that of the compiled model.
        backend: accepted for scripts written for Horovod.
        kwargs: names and values.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise UsageError(
                "Model must be built first. Run `model.build(input_shape)`: its variables do not exist yet.",
                fix="Call model.build(input_shape), or give the first layer an input shape.",
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def _held(self) -> list[Any]:
        own = [] if self.optimizer is None else list(_values_of(self.optimizer))
        return [*self.model.variables, *own]


def _values_of(optimizer: Any) -> Any:
    found = optimizer.variables
    return found() if callable(found) else found
