"""Checks of the arguments of ``DistributedOptimizer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hora.adapter.ops import ReduceOp
from hora.torch._groups import even_parts

__all__ = ["check_arguments", "named", "split_groups"]


def check_arguments(
    *, backward_passes_per_step: int, op: ReduceOp, gradient_predivide_factor: float, groups: Any
) -> None:
    """Raise ValueError for values that cannot be."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be > 0.")
    if op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
        raise ValueError(f"op={op!r}: gradients are combined by Average, Sum or Adasum.")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.Average:
        raise ValueError("gradient_predivide_factor is supported with op=Average only.")
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(
                f"groups={groups} should be a non-negative number, or a list of lists of parameters."
            )
    elif not isinstance(groups, list | tuple) or not all(
        isinstance(group, list | tuple) and all(isinstance(member, torch.Tensor) for member in group)
        for group in groups
    ):
        raise ValueError("groups should be a non-negative number, or a list of lists of torch.Tensor.")


def named(optimizer: Any, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """A name for each parameter of the optimizer, in its order.

    Raises:
        ValueError: names that are missing, doubled or malformed.
    """
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [
            (f"noname.{number}.{place}", parameter)
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        ]
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), as of "
            "model.named_parameters()."
        )
    doubled = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if doubled:
        raise ValueError(
            "Parameter names in named_parameters must be unique. "
            f"Found duplicates: {', '.join(map(str, doubled))}."
        )
    names = {parameter: str(name) for name, parameter in pairs}
    missing = sum(parameter not in names for parameter in own)
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named "
            f"({missing} of {len(own)}). Give the names of all parameters of the optimizer."
        )
    return [(names[parameter], parameter) for parameter in own]


def split_groups(groups: Any, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of parameters; one that is in none is reduced alone.

    Raises:
        ValueError: a parameter that is in two groups, or is not the optimizer's.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(groups, int):
        return [list(part) for part in even_parts(wanted, groups)]
    times = Counter(id(parameter) for group in groups for parameter in group)
    if any(count > 1 for count in times.values()):
        raise ValueError("A parameter can only appear once in groups.")
    known = {id(parameter) for parameter in parameters}
    return [
        kept
        for group in groups
        if (kept := [parameter for parameter in group if id(parameter) in known and parameter.requires_grad])
    ]
