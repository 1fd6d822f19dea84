"""Horovod's elastic names, on :mod:`hora.torch.elastic`.

A script that Horovod's documentation shows runs under ``hora run --horovod --min-workers``: ``run`` calls
its function anew when workers have died or come, with the state of the last commit on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hora.adapter.negotiation.errors import HorovodInternalError, HostsUpdatedInterrupt
from hora.core.errors import WorldChangedError
from hora.torch import elastic as native
from hora.torch.elastic import ElasticSampler
from hora.torch.elastic._run import going_on
from hora.torch.horovod import _session

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


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``func(state, ...)``, and anew with the state of the last commit when the workers change."""
    return going_on(
        func,
        leave=_session.shutdown,
        join=_session.init,
        interrupts=(HostsUpdatedInterrupt, WorldChangedError),
    )


class _Interrupted:
    def _interrupt(self) -> Exception:
        return HostsUpdatedInterrupt()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Nothing: the supervisor tells all ranks, and they agree in ``commit()``."""


class State(_Interrupted, native.State):
    """A state of the user's own; see :class:`hora.torch.elastic.State`."""


class ObjectState(_Interrupted, native.ObjectState):
    """A state of plain values.

    Args:
        bcast_object: accepted for scripts that give Horovod's function; Hora's is used.
        get_rank: likewise.
        kwargs: names and values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class StateHandler:
    """Keeps one part of a state.

    Args:
        value: the part.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Keep a copy."""
        import copy

        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the copy."""
        import copy

        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take rank 0's."""
        one = native.TorchState(part=self.value)
        one.sync()
        self.save()

    def set_value(self, value: Any) -> None:
        """Keep another part from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Of a module."""


class OptimizerStateHandler(StateHandler):
    """Of an optimizer."""


class SamplerStateHandler(StateHandler):
    """Of an :class:`ElasticSampler`."""


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler keeps which kind of part."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Use other handlers from now on."""
    global _registry
    _registry = registry


class TorchState(_Interrupted, native.TorchState):
    """The state of a training: a model, an optimizer, and further parts and values by name.

    Args:
        model: a module.
        optimizer: an optimizer, wrapped or not.
        kwargs: samplers, further modules and optimizers, and plain values.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
