"""``KerasState``: a model, its optimizer and plain values, committed in memory and in the run directory."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hora.adapter import stored
from hora.core.errors import CheckpointError, UsageError
from hora.keras._backend import api, engine
from hora.keras._variables import broadcast_variables, variables_of

__all__ = ["KerasState"]

Base: Any = engine.State


class KerasState(Base):  # type: ignore[misc] # what it derives from depends on the backend
    """The state of a training with ``model.fit`` or in a loop.

    ``commit()`` copies the model's variables, its optimizer's, the position of a ``hora.data_loader`` and the
    other values. In a run with a directory (``hora run``) rank 0 also writes them there, under
    ``checkpoints/``, and a job that is started anew begins with the last whole commit. Random generators are
    left alone.

    Args:
        model: a model.
        optimizer: its optimizer; by default that of ``compile``.
        loader: what ``hora.data_loader`` returned.
        values: plain values by name, such as ``batch=0, epoch=0``; they become attributes.

    Raises:
        UsageError: a model without an optimizer, or a value of a name that the state has already.
    """

    def __init__(self, model: Any, optimizer: Any = None, loader: Any = None, **values: Any) -> None:
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise UsageError(
                "The model of a KerasState is not compiled, so that its optimizer would not be kept.",
                fix="Call model.compile(hora.DistributedOptimizer(...), ...) first.",
            )
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._arrays: list[Any] = []
        super().__init__(**values)

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """Its optimizer."""
        return self._optimizer

    def save(self) -> None:
        """Keep copies in memory."""
        self._arrays = self._now()
        if self._loader is not None:
            self.position = self._loader.state_dict()["position"]
        super().save()

    def restore(self) -> None:
        """Go back to the last copies."""
        super().restore()
        self._take(self._arrays)
        self._place_loader()

    def commit(self) -> None:
        """Keep the state as it is now, also on the disk. Every rank calls it at the same place.

        Raises:
            CheckpointError: it cannot be written.
        """
        super().commit()
        if api.rank() == 0 and (folder := stored.folder_of(api.context().run)) is not None:
            values = {name: getattr(self, name) for name in self._names}
            stored.write(folder, count=self._commits, world=api.size(), values=values, arrays=self._arrays)

    def _sync(self, root: int) -> None:
        if root == 0 and self._commits == 0:
            self._resume()
        super()._sync(root)
        if self._model.built:
            broadcast_variables(variables_of(self._model, self._optimizer), root)
        self._place_loader()

    def _resume(self) -> None:
        """Begin with the last commit of an earlier attempt, if there is one; rank 0 reads it."""
        folder = stored.folder_of(api.context().run)
        found = stored.newest(folder) if folder is not None and api.rank() == 0 else None
        if found is not None:
            self._commits = found.commits
            for name, value in found.values.items():
                setattr(self, name, value)
            self._take(found.arrays)
        self._commits = api.broadcast_object(self._commits, 0)

    def _now(self) -> list[Any]:
        if not self._model.built:
            return []
        return [
            np.array(keras.ops.convert_to_numpy(each.value))
            for each in variables_of(self._model, self._optimizer)
        ]

    def _take(self, arrays: list[Any]) -> None:
        if not arrays:
            return
        variables = variables_of(self._model, self._optimizer) if self._model.built else []
        if [tuple(variable.shape) for variable in variables] != [array.shape for array in arrays]:
            raise CheckpointError(
                f"The commit's {len(arrays)} variables are not those of the model ({len(variables)}).",
                fix="Build the model as it was (keras.Input first, or model.build(input_shape)), or use "
                "another run directory.",
            )
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)

    def _place_loader(self) -> None:
        if self._loader is not None:
            self._loader.load_state_dict({"position": self.position})
