"""``shard="all"``: parameters, gradients and state are spread over the ranks, by ``fully_shard`` of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.torch._compression import Compression
from hora.torch._context import Context
from hora.torch._rules import Rule
from hora.torch._state import broadcast_parameters

__all__ = ["gathered", "shared_out", "spread_fully"]

LINES = (
    "model = fully_shard(model) from torch.distributed.fsdp, then the optimizer of model.parameters(), "
    "without DistributedOptimizer"
)


def spread_fully(
    optimizer: Optimizer, module: object, rule: Rule, *, grouped: bool, context: Context
) -> list[tuple[str, torch.Tensor]]:
    """Spread a module over all ranks, and let the optimizer have its new parameters; their names too.

    Every rank gets rank 0's parameters and buffers first: afterwards no rank has them whole. The members of
    each ``torch.nn.ModuleList`` (a transformer's layers) are gathered one at a time; parts that the script
    has given to ``fully_shard`` before stay as they are.

    Raises:
        GradientError: arguments that ``fully_shard`` does not have, or an optimizer that is in use already.
    """
    if not isinstance(module, torch.nn.Module):
        raise GradientError(
            "shard='all' spreads a module, and named_parameters is "
            f"{'left out' if module is None else type(module).__name__}.",
            fix='Write DistributedOptimizer(optimizer, model, shard="all").',
        )
    _check(optimizer, rule, grouped=grouped)
    before = dict(module.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    for name, parameter in before.items():
        names.setdefault(id(parameter), name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise GradientError(
                    f"The optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of the "
                    "module's, which shard='all' spreads.",
                    fix="Make the optimizer from model.parameters() of the model that you give.",
                )
    if context.world.size == 1:
        return [(names[id(each)], each) for group in optimizer.param_groups for each in group["params"]]
    broadcast_parameters(module)
    _spread(module, context)
    after = dict(module.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        group["params"] = [after[names[id(parameter)]] for parameter in group["params"]]
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) in own]


def gathered(state_dict: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """A state dict with whole tensors. Every rank calls it."""
    state = {}
    for number, entries in state_dict["state"].items():
        whole = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in entries.items()
        }
        if keep:
            state[number] = whole
    return state_dict | {"state": state}


def shared_out(state_dict: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The same state dict with this rank's parts of whole tensors."""
    from torch.distributed.tensor import distribute_tensor

    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of = dict(zip(numbers, parameters, strict=False))

    def part(value: Any, parameter: Any) -> Any:
        whole = isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")
        if not whole or value.shape != parameter.shape or not hasattr(parameter, "device_mesh"):
            return value
        value = value.to(parameter.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    state = {
        number: {key: part(value, of[number]) for key, value in entries.items()} if number in of else entries
        for number, entries in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _check(optimizer: Optimizer, rule: Rule, *, grouped: bool) -> None:
    asked = {
        f"op={rule.op.name}": rule.op is not ReduceOp.Average,
        f"compression={type(rule.compression).__name__}": rule.compression is not Compression.none,
        f"backward_passes_per_step={rule.passes}": rule.passes != 1,
        f"gradient_predivide_factor={rule.predivide}": rule.predivide != 1,
        "sparse_as_dense=True": rule.sparse_as_dense,
        "groups": grouped,
        "process_set": rule.process_set.process_set_id != 0,
    }
    for what in (what for what, given in asked.items() if given):
        raise GradientError(
            f"{what} does not go with shard='all': there torch.distributed.fsdp.fully_shard averages the "
            "gradients, and it does not have that.",
            fix=f"Leave it out, or write shard='optimizer'; to steer fully_shard yourself: {LINES}.",
        )
    if any(optimizer.state.values()):
        raise GradientError(
            f"The {type(optimizer).__name__} optimizer has a state already, and shard='all' gives it other "
            "parameters.",
            fix="Call DistributedOptimizer first, then load_state_dict(); of an optimizer that begins with a "
            f"state, such as Adagrad: {LINES}.",
        )


def _spread(module: torch.nn.Module, context: Context) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = DeviceMesh.from_group(context.group, context.device.type)
    for part in [*_layers(module), module]:
        if not isinstance(part, FSDPModule):
            fully_shard(part, mesh=mesh)


def _layers(module: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The repeated parts of a model, inner ones first."""
    found: list[torch.nn.Module] = []
    for each in module.modules():
        if isinstance(each, torch.nn.ModuleList):
            found += (part for part in each if _has_forward(part) and _has_parameters(part))
    return list(dict.fromkeys(reversed(found)))


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_forward(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
