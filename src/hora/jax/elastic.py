"""Trainings that go on after a worker's end: a state that is committed, and jobs that are started anew.

::

    hora.init()
    state = hora.elastic.JaxState(params=params, opt_state=opt_state, loader=loader, epoch=0)

    @hora.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            for x, y in loader:
                state.params, state.opt_state = step(state.params, state.opt_state, x, y)
            state.commit()

    train(state)

JAX's runtime keeps the processes that it began with. ``hora run --restarts 3`` starts all workers anew after
a failure, and the function begins with the last commit, which is in the run directory.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from hora.adapter import elastic, stored
from hora.adapter.elastic import run
from hora.core.errors import CheckpointError
from hora.jax import _objects
from hora.jax._arrays import local
from hora.jax._context import context, rank, size
from hora.jax._objects import broadcast_object
from hora.jax._state import broadcast_parameters

__all__ = ["JaxState", "ObjectState", "run"]


class ObjectState(elastic.ObjectState):
    """Plain values by name, committed in memory; they become attributes."""

    @staticmethod
    def _api() -> Any:
        return _objects


class JaxState(ObjectState):
    """The state of a training: pytrees of arrays, a loader's position, and plain values.

    ``commit()`` copies everything to this rank's memory. In a run with a directory (``hora run``) rank 0
    also writes it there, under ``checkpoints/``, and a job that is started anew begins with the last whole
    commit, on any number of workers. Arrays must be the same on all ranks, as parameters and the state of an
    optimizer are.

    Args:
        params: a pytree of arrays.
        opt_state: that of an optimizer; its numbers and arrays are kept.
        loader: what ``hora.data_loader`` returned; its position is kept.
        values: plain values such as JSON takes, as ``epoch=0``.

    Raises:
        UsageError: a value of a name that the state has already.
    """

    def __init__(self, params: Any = None, opt_state: Any = None, loader: Any = None, **values: Any) -> None:
        self._loader = loader
        self._trees = {"params": params, "opt_state": opt_state}
        self._saved_trees: dict[str, list[Any]] = {}
        super().__init__(**values)

    @property
    def params(self) -> Any:
        """The parameters."""
        return self._trees["params"]

    @params.setter
    def params(self, tree: Any) -> None:
        self._trees["params"] = tree

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        return self._trees["opt_state"]

    @opt_state.setter
    def opt_state(self, tree: Any) -> None:
        self._trees["opt_state"] = tree

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("params", "opt_state"):
            object.__setattr__(self, name, value)  # trees are no plain values
        else:
            super().__setattr__(name, value)

    def save(self) -> None:
        """Keep copies in memory."""
        self._saved_trees = {name: _arrays(tree) for name, tree in self._trees.items()}
        if self._loader is not None:
            self.position = self._loader.state_dict()["position"]
        super().save()

    def restore(self) -> None:
        """Go back to the last copies."""
        super().restore()
        self._take([array for arrays in self._saved_trees.values() for array in arrays])
        self._place_loader()

    def commit(self) -> None:
        """Keep the state as it is now, also on the disk. Every rank calls it at the same place.

        Raises:
            CheckpointError: it cannot be written.
        """
        super().commit()
        folder = stored.folder_of(context().run)
        if rank() == 0 and folder is not None:
            stored.write(
                folder,
                count=self._commits,
                world=size(),
                values={name: getattr(self, name) for name in self._names},
                arrays=[array for arrays in self._saved_trees.values() for array in arrays],
            )

    def _sync(self, root: int) -> None:
        if root == 0 and self._commits == 0:
            self._resume()
        super()._sync(root)
        for name, tree in self._trees.items():
            if jax.tree.leaves(tree):
                self._trees[name] = broadcast_parameters(tree, root)
        self._place_loader()

    def _resume(self) -> None:
        """Begin with the last commit of an earlier attempt, if there is one; rank 0 reads it."""
        folder = stored.folder_of(context().run)
        found = stored.newest(folder) if folder is not None and rank() == 0 else None
        if found is not None:
            self._commits = found.commits
            for name, value in found.values.items():
                setattr(self, name, value)
            self._take(found.arrays)
        self._commits = broadcast_object(self._commits, 0)

    def _take(self, arrays: list[Any]) -> None:
        rest = list(arrays)
        shapes = [np.shape(leaf) for tree in self._trees.values() for leaf in jax.tree.leaves(tree)]
        if shapes != [array.shape for array in arrays]:
            raise CheckpointError(
                f"The commit's {len(arrays)} arrays are not those of params and opt_state ({len(shapes)}).",
                fix="Build model and optimizer as they were, or use another run directory.",
            )
        for name, tree in self._trees.items():
            leaves, form = jax.tree.flatten(tree)
            taken = [_like(leaf, rest.pop(0)) for leaf in leaves]
            self._trees[name] = jax.tree.unflatten(form, taken)

    def _place_loader(self) -> None:
        if self._loader is not None:
            self._loader.load_state_dict({"position": self.position})


def _arrays(tree: Any) -> list[Any]:
    """Copies of the leaves in this rank's memory; of global arrays, this rank's whole copy."""
    return [np.array(leaf) for leaf in jax.tree.leaves(local(tree))]


def _like(leaf: Any, array: Any) -> Any:
    """An array again, or a number where there was one."""
    return array.item() if isinstance(leaf, (int, float, complex)) else jax.numpy.asarray(array)
