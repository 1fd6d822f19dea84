"""Horovod's elastic names. They come with Hora's elastic engine; until then each says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from hora.torch.horovod._errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"hvd.elastic.{name} comes with the elastic engine, which Hora does not have yet. Train with a fixed "
        "number of workers: `hora run --horovod -np N script.py`, and resume from a checkpoint."
    )


def run(func: Any) -> NoReturn:
    """Not there yet.

    Raises:
        NotImplementedError: always.
    """
    _refuse("run")


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


class ElasticSampler(State):
    """Not there yet, see :class:`State`."""
