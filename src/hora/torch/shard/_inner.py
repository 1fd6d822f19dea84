"""An optimizer of the plain class that steps on other tensors than the one it is made from.

It has that one's hyper-parameters and attributes, and none of its hooks: so the plain class's own ``step``
runs on shares of the parameters.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["give_back", "raw_step", "stand_in"]

_OWN = frozenset(
    {
        "_hora",
        "_hora_share",
        "_hora_norms",
        "param_groups",
        "state",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
    }
)
"""Attributes that are not shared."""


def stand_in(
    optimizer: Optimizer,
    plain: type[Optimizer],
    parameters: Sequence[Sequence[torch.Tensor]],
    state: Mapping[Any, Any],
) -> Any:
    """An optimizer of the class ``plain`` on ``parameters``, a list for each group, with that state."""
    made: Any = object.__new__(plain)
    vars(made).update({key: value for key, value in vars(optimizer).items() if key not in _OWN})
    vars(made).update(
        _hora_share=True,  # the watch leaves it alone
        state=state,
        param_groups=[
            {**group, "params": list(own)}
            for group, own in zip(optimizer.param_groups, parameters, strict=True)
        ],
        _optimizer_step_pre_hooks=collections.OrderedDict(),
        _optimizer_step_post_hooks=collections.OrderedDict(),
    )
    return made


def give_back(inner: Optimizer, optimizer: Optimizer) -> None:
    """Let the optimizer have what a step has changed besides the state."""
    for key, value in vars(inner).items():
        if key not in _OWN and vars(optimizer).get(key) is not value:
            vars(optimizer)[key] = value
    for own, group in zip(inner.param_groups, optimizer.param_groups, strict=True):
        for key, value in own.items():
            if key != "params" and group.get(key) is not value:
                group[key] = value


def raw_step(plain: type[Optimizer]) -> Callable[..., Any]:
    """The class's ``step``, without the hooks that torch has put around it."""
    step: Any = plain.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
