"""The parameters of one ``DistributedOptimizer``: their names, and what is refused about them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from hora.core.errors import GradientError
from hora.torch._context import Context

__all__ = [
    "NamedParameters",
    "check_devices",
    "check_unowned",
    "claim",
    "describe",
    "named_parameters_of",
    "place_of",
]

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]

_owners: Any = WeakTensorKeyDictionary()
"""Parameter -> weak reference to the optimizer that averages its gradient."""


def named_parameters_of(
    optimizer: Optimizer, given: NamedParameters | None
) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters in order of registration, checked against the optimizer's."""
    own = [
        (place_of(number, index), parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
    if given is None:
        return own
    is_module = isinstance(given, torch.nn.Module)
    pairs = list(given.named_parameters()) if isinstance(given, torch.nn.Module) else list(given)
    inside = {id(parameter) for _, parameter in own}
    named: list[tuple[str, torch.Tensor]] = []
    seen: dict[int, str] = {}
    names: set[str] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise GradientError(
                f"named_parameters holds {type(pair).__name__}, not pairs of a name and a tensor.",
                fix="Write named_parameters=model.named_parameters(), or pass the model.",
            )
        name, parameter = pair
        if name in names or id(parameter) in seen:
            raise GradientError(
                f"named_parameters holds {name!r} twice"
                + ("." if name in names else f": it is the same tensor as {seen[id(parameter)]!r}."),
                fix="Give each parameter once, under its own name.",
            )
        names.add(name)
        seen[id(parameter)] = name
        if id(parameter) in inside:
            named.append((name, parameter))
        elif not is_module or parameter.requires_grad:
            raise GradientError(
                f"{name!r} is in named_parameters but not in the optimizer, which would never change it.",
                fix="Give the optimizer all of model.parameters(), or give DistributedOptimizer only the "
                "(name, parameter) pairs that this optimizer has.",
            )
    missing = [(place, parameter) for place, parameter in own if id(parameter) not in seen]
    if missing:
        place, parameter = missing[0]
        raise GradientError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters; the first is {place}, "
            f"of shape {tuple(parameter.shape)}.",
            fix="Name the parameters of all modules that the optimizer trains, or leave them out.",
        )
    return named


def place_of(group: int, index: int) -> str:
    return f"parameter {index} of group {group}"


def describe(name: str, parameter: torch.Tensor) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{name} ({str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}{frozen})"


def check_unowned(named: list[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in named:
        owner = _owners.get(parameter)
        if owner is not None and owner() is not None:
            raise GradientError(
                f"The gradient of {name} is averaged by another DistributedOptimizer already.",
                fix="Delete the other one first (del optimizer), or put its parameters into one optimizer.",
            )


def check_devices(named: list[tuple[str, torch.Tensor]], context: Context) -> None:
    for name, parameter in named:
        if parameter.device.type not in context.devices:
            raise GradientError(
                f"{name} is on {parameter.device}; the engines of this job take "
                f"{' and '.join(sorted(context.devices))}.",
                fix="Move the model first: model.to(hora.device()); a meta model with "
                "model.to_empty(device=hora.device()).",
            )


def claim(optimizer: Any, named: list[tuple[str, torch.Tensor]]) -> None:
    for _, parameter in named:
        _owners[parameter] = weakref.ref(optimizer)
