"""Horovod's elastic names. They come with Hora's elastic engine; until then each says so when it is called,
so that a script which only defines something with them can be imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from hora.torch.horovod._errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"hvd.elastic.{name} comes with the elastic engine, which Hora does not have yet. Train with a fixed "
        "number of workers: `hora run --horovod -np N script.py`, and resume from a checkpoint."
    )


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of ``func`` that is not there yet.

    Raises:
        NotImplementedError: when that function is called.
    """

    @functools.wraps(func)
    def refused(*args: Any, **kwargs: Any) -> Any:
        _refuse("run")

    return refused


def get_handler_registry() -> NoReturn:
    """Not there yet.

    Raises:
        NotImplementedError: always.
    """
    _refuse("get_handler_registry")


def set_handler_registry(registry: Any) -> NoReturn:
    """Not there yet.

    Raises:
        NotImplementedError: always.
    """
    _refuse("set_handler_registry")


class State:
    """Not there yet.

    Raises:
        NotImplementedError: when it is made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self).__name__)


class ObjectState(State):
    """Not there yet, see :class:`State`."""


class TorchState(ObjectState):
    """Not there yet, see :class:`State`."""


class StateHandler(State):
    """Not there yet, see :class:`State`."""


class ModelStateHandler(StateHandler):
    """Not there yet, see :class:`State`."""


class OptimizerStateHandler(StateHandler):
    """Not there yet, see :class:`State`."""


class SamplerStateHandler(StateHandler):
    """Not there yet, see :class:`State`."""


class ElasticSampler(State):
    """Not there yet, see :class:`State`."""
