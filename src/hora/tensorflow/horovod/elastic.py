"""Horovod's elastic names for TensorFlow, on :mod:`hora.tensorflow.elastic`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hora.adapter.negotiation.errors import HorovodInternalError, HostsUpdatedInterrupt
from hora.tensorflow.elastic import ObjectState, State, TensorFlowKerasState, TensorFlowState
from hora.tensorflow.horovod import _session

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``func(state, ...)``, and anew with the state of the last commit after an error of Horovod's.

    When a worker has ended, nothing can be done inside the others: the error goes on, and
    ``hora run --restarts`` starts all workers anew, with the last commit.
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        while True:
            state.sync()
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if error.echo:
                    raise
                state.restore()
            except HostsUpdatedInterrupt:
                state.save()
            _session.shutdown()
            _session.init()
            state.on_reset()

    return elastic
