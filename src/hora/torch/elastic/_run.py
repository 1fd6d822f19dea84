"""``run``: a training function that goes on when workers come or go."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError

from hora.core.elastic import Control
from hora.core.errors import CollectiveError, VerdictError, WorldChangedError, WorldError
from hora.torch import _context, _member
from hora.torch.elastic._state import State

__all__ = ["going_on", "run"]

LOST = 5.0
"""Seconds in which the supervisor tells that a worker is gone, once an error looks like the consequence."""


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on when workers come or go.

    The function gets a :class:`State` first. It is called once, and anew whenever the job has another set of
    workers: the state is then that of the last ``commit()``, the same on all of them. So it begins where the
    state says, as with a loader of :func:`hora.torch.data_loader` it does by itself. Started without
    ``hora run --min-workers`` it is called once.

    What the function raises by itself is raised here too: this worker ends, and another is started in its
    place. After the third time without a commit in between the job fails.

    Args:
        function: takes the state, and what else the caller gives.

    Returns:
        The function to call; it returns what ``function`` returns.
    """
    return going_on(function, leave=_context.shutdown, join=_context.init, interrupts=(WorldChangedError,))


def going_on(
    function: Callable[..., Any],
    *,
    leave: Callable[[], None],
    join: Callable[[], None],
    interrupts: tuple[type[Exception], ...],
) -> Callable[..., Any]:
    """:func:`run`, for whatever joins and leaves the job, and raises in a commit when the workers change."""

    def rejoin(state: State) -> None:
        leave()
        gc.collect()  # what an exception's frames have held of the old engines
        join()
        state.on_reset()

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        member = _context.required("elastic.run").member
        if member is None:
            state.sync()
            return function(state, *args, **kwargs)
        control = member.control
        _member.prepare(state.told)
        if member.alone:
            rejoin(state)
        while True:
            control.tell("running", number=control.number)
            try:
                state.sync()
                result = function(state, *args, **kwargs)
                if control.finish():
                    return result
            except interrupts:
                pass  # the state was saved before, by all ranks
            except Exception as error:
                if not _is_lost(error, control):
                    raise
            state.restore()
            rejoin(state)

    return elastic


def _is_lost(error: Exception, control: Control) -> bool:
    """Whether an error comes from the end of the world, rather than from the script."""
    if isinstance(error, VerdictError):
        return control.reset_due() is not None
    if control.reset_due(LOST if _may_be_lost(error) else 0.0) is not None:
        return True
    if not looks_lost(error):
        return False
    # The connections are lost, and no worker has died: the others are told to leave this world, too.
    control.tell("broken", number=control.number, reason=f"{type(error).__name__}: {error}"[:500])
    return control.reset_due(LOST) is not None


def looks_lost(error: BaseException | None) -> bool:
    """Whether an error is that of a lost connection, or of an operation that another rank will not join."""
    while error is not None:
        if isinstance(error, DistError) or getattr(error, "echo", False) is True:
            return True
        error = error.__cause__ or error.__context__
    return False


def _may_be_lost(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RuntimeError | OSError | DistError | CollectiveError | WorldError):
            return True
        error = error.__cause__ or error.__context__
    return False
