"""Optimizers whose step needs norms of whole tensors: LARS, LAMB, NovoGrad.

A step first does what it can element by element, then asks for the norms of all tensors at once, and goes on
with them. So the tensors may be parts of the whole ones, on several ranks: one small message makes the norms
those of the whole. Where ``shard="optimizer"`` cuts the parameters, the shards answer; parameters that
``fully_shard`` has spread (DTensors) are answered for here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableMapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hora.core.errors import GradientError, UsageError

__all__ = ["Columns", "Layerwise", "Members", "Norms", "Stage", "local", "sums_of_squares"]

Columns = Sequence[list[Tensor]]
"""Lists of tensors, each with one for each parameter: such as its values, and its gradient."""

Norms = list[Tensor]
"""For each column a tensor [parameters] of norms, float32 or float64."""

Stage = Generator[Columns, Norms, None]
"""A step: yields what it needs the norms of, is sent them, and goes on; or needs none, and yields nothing."""

Exchange = Callable[[list[Tensor], Columns], Norms]

HALF = (torch.float16, torch.bfloat16)


class Members:
    """The parameters of a group that have a gradient, with their state.

    Args:
        parameters: with a gradient each.
        state: the optimizer's.
        master: step half-precision parameters in a copy of float32.

    Attributes:
        weights: what the step changes in place: the parameters, what this rank has of them, or the copies.
        gradients: in the same form.
        states: of each.
    """

    def __init__(self, parameters: list[Tensor], state: MutableMapping[Any, Any], *, master: bool) -> None:
        self.parameters = parameters
        self.states: list[dict[str, Any]] = [state[parameter] for parameter in parameters]
        self._master = [master and parameter.dtype in HALF for parameter in parameters]
        self.weights = [
            _refreshed(parameter, entries) if kept else local(parameter)
            for parameter, entries, kept in zip(parameters, self.states, self._master, strict=True)
        ]
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        self.gradients = [
            gradient.float() if kept else gradient
            for gradient, kept in zip(gradients, self._master, strict=True)
        ]

    def rows(self, key: str) -> list[Tensor]:
        """An entry of the state with a number for each element, zeros to begin with."""
        for parameter, entries, kept in zip(self.parameters, self.states, self._master, strict=True):
            if key not in entries:
                entries[key] = torch.zeros_like(parameter, dtype=torch.float32 if kept else None)
        return [local(entries[key]) for entries in self.states]

    def write(self) -> None:
        """After the step: let the parameters have what was done to their copies."""
        for parameter, weight, kept in zip(self.parameters, self.weights, self._master, strict=True):
            if kept:
                local(parameter).copy_(weight)


class Layerwise(torch.optim.Optimizer):
    """A base: ``_stage`` is the step of one parameter group.

    Attributes:
        columns: how many norms a step needs of each parameter at most.
    """

    columns: ClassVar[int]
    _hora_norms: Exchange | None = None

    def _stage(self, group: dict[str, Any], members: Members) -> Stage:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim.Optimizer``.

        Raises:
            UsageError: parameters that are not real floating-point numbers.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                name = type(self).__name__
                raise UsageError(
                    f"{name} steps real floating-point parameters, and one is {parameter.dtype}.",
                    fix=f"Give {name} those that are, and the others to another optimizer.",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; ``closure``, if given, computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        waiting: list[tuple[Stage, Members, Columns]] = []
        done: list[Members] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            _check_dense(parameters, self)
            if not parameters:
                continue
            members = Members(parameters, self.state, master=group["master"])
            stage = self._stage(group, members)
            columns = next(stage, None)
            done.append(members)
            if columns is not None:
                waiting.append((stage, members, columns))
        # Asked for also where this rank has nothing: others may.
        parameters = [parameter for _, members, _ in waiting for parameter in members.parameters]
        lists = [[each for _, _, row in waiting for each in row[place]] for place in range(self.columns)]
        norms = (self._hora_norms or _own_norms)(parameters, lists)
        start = 0
        for stage, members, _ in waiting:
            stop = start + len(members.parameters)
            try:
                stage.send([row[start:stop] for row in norms])
            except StopIteration:
                start = stop
            else:
                raise AssertionError("a stage asks once")
        for members in done:
            members.write()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim.Optimizer``, and what is kept in float32 stays so."""
        super().load_state_dict(state_dict)
        # torch makes the state of a half-precision parameter half too.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and parameter.dtype in HALF and value.dtype is torch.float32:
                    self.state[parameter][key] = value.to(
                        parameter.device if key != "step" else "cpu", copy=True
                    )


def sums_of_squares(columns: Columns) -> list[Tensor]:
    """For each column a tensor [parameters]: the squared norms of what this rank has, in float64."""
    return [
        torch.stack([norm.double() for norm in torch._foreach_norm(column)]).square()
        if column
        else torch.zeros(0, dtype=torch.float64)
        for column in columns
    ]


def _own_norms(parameters: list[Tensor], columns: Columns) -> Norms:
    """Norms of parameters that are whole here, or DTensors."""
    if not parameters:
        return [torch.zeros(0) for _ in columns]
    wide = torch.float64 if any(each.dtype is torch.float64 for each in columns[0]) else torch.float32
    spread = [place for place, parameter in enumerate(parameters) if _mesh(parameter) is not None]
    if spread:
        return _spread_norms(parameters, spread, columns, wide)
    return [torch.stack(torch._foreach_norm(column, 2.0, wide)) for column in columns]


def _spread_norms(parameters: list[Tensor], spread: list[int], columns: Columns, wide: torch.dtype) -> Norms:
    squares = torch.stack(sums_of_squares(columns))
    meshes: dict[Any, list[int]] = {}
    for place in spread:
        parameter: Any = parameters[place]
        meshes.setdefault((parameter.device_mesh, tuple(map(str, parameter.placements))), []).append(place)
    for places in meshes.values():
        example: Any = parameters[places[0]]
        part = squares[:, places]
        for dimension, placement in enumerate(example.placements):
            if placement.is_shard():
                dist.all_reduce(part, group=example.device_mesh.get_group(dimension))
            elif not placement.is_replicate():
                raise GradientError(
                    f"A parameter is placed as {placement}, so no rank knows its values.",
                    fix="Give the optimizer parameters that are sharded or replicated.",
                )
        squares[:, places] = part
    return list(squares.sqrt().to(wide).unbind())


def _refreshed(parameter: Tensor, entries: dict[str, Any]) -> Tensor:
    """The float32 copy of a parameter, also after the parameter has been given other values."""
    if "master" not in entries:
        entries["master"] = parameter.detach().to(torch.float32, copy=True)
    master, own = local(entries["master"]), local(parameter)
    return master.copy_(torch.where(master.to(own.dtype) == own, master, own.float()))


def _check_dense(parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise UsageError(
            f"{type(optimizer).__name__} takes dense gradients, and one is sparse.",
            fix="Make the embedding with sparse=False, or give DistributedOptimizer sparse_as_dense=True.",
        )


def _mesh(tensor: Any) -> Any:
    return getattr(tensor, "device_mesh", None)


def local(tensor: Any) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if _mesh(tensor) is not None else tensor  # type: ignore[no-any-return]
