"""The state of a training in plain values, for frameworks whose jobs start anew when a worker is lost.

Their runtimes keep the ranks that they began with. So each commit is written to the run directory, and
``hora run --restarts N`` starts all workers again when one has ended; :func:`run` then begins with it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from hora.core.errors import UsageError

__all__ = ["ObjectState", "run"]


class ObjectState:
    """Values, which are its attributes; one that is set later belongs to it as well.

    A subclass names the module of its framework's collectives in :meth:`_api`.

    Args:
        values: names and values; anything that can be copied and pickled.
    """

    def __init__(self, **values: Any) -> None:
        self._names: list[str] = []
        self._saved_values: dict[str, Any] = {}
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(
                    f"{name}= cannot be a value of a state: it has an attribute of that name.",
                    fix=f"Write another name, such as {name.strip('_')}_value=...",
                )
            setattr(self, name, value)
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._names:
            self._names.append(name)
        super().__setattr__(name, value)

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these when the training begins, anew or for the first time."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The training begins, with this set of workers."""
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now. Every rank calls it at the same place."""
        self._commits += 1
        self.save()

    def check_host_updates(self) -> None:
        """As in Horovod. The workers of a job on this backend change only when it starts anew."""

    def save(self) -> None:
        """Keep copies of the values."""
        self._saved_values = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Go back to the values of the last copy."""
        for name, value in self._saved_values.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give all ranks the values of one that has seen the most commits."""
        self._sync(self._root())
        self.save()

    @staticmethod
    def _api() -> Any:
        """The module with ``allgather_object`` and ``broadcast_object``."""
        raise NotImplementedError

    def _root(self) -> int:
        commits = self._api().allgather_object(self._commits)
        self._commits = max(commits)
        root: int = commits.index(self._commits)
        return root

    def _sync(self, root: int) -> None:
        values = self._api().broadcast_object({name: getattr(self, name) for name in self._names}, root)
        for name, value in values.items():
            setattr(self, name, value)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on after a failure: it begins where its state was committed last.

    With ``hora run --restarts`` the job starts anew.

    Args:
        function: takes the state, an :class:`ObjectState`, and what else the caller gives.

    Returns:
        The function to call; it returns what ``function`` returns.
    """

    @functools.wraps(function)
    def elastic(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        state.on_reset()
        return function(state, *args, **kwargs)

    return elastic
