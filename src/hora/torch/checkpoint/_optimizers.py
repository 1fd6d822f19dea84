"""An optimizer's state by the names of its parameters, whole or in the parts that this rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from hora.core.errors import CheckpointError
from hora.torch.checkpoint._encode import Keep, decode, encode

if TYPE_CHECKING:
    from hora.torch.checkpoint._collect import Collected

__all__ = ["Part", "collect", "loaded", "names_of"]


@dataclass(frozen=True)
class Part:
    """Neighbouring elements of a tensor, in the order in which its memory has them.

    Attributes:
        values: them.
        start: place of the first.
        total: elements of the whole tensor.
    """

    values: torch.Tensor
    start: int
    total: int

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """DCP's protocol for tensors that lie in parts on the ranks."""
        offset, sizes = torch.Size([self.start]), torch.Size([self.values.numel()])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offset, sizes),
            properties=TensorProperties(dtype=self.values.dtype),
            size=torch.Size([self.total]),
        )
        return [WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data)]


def names_of(state: Mapping[str, Any]) -> dict[int, str]:
    """``id`` of a parameter -> its name in the model. With several models the model's own is in front."""
    from hora.torch.checkpoint._collect import plain_module  # it builds on this module

    modules = {key: plain_module(value) for key, value in state.items() if isinstance(value, torch.nn.Module)}
    found: dict[int, str] = {}
    for key, module in modules.items():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), name if len(modules) == 1 else f"{key}/{name}")
    return found


def collect(
    key: str, optimizer: Optimizer, names: Mapping[int, str], keep: Keep, found: Collected
) -> dict[str, Any]:
    """What an optimizer has to save, as JSON holds it; its tensors are taken in."""
    before = set(found.tensors)
    attachment = vars(optimizer).get("_hora")
    own = [
        [_name(names, number, place, parameter) for place, parameter in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]
    tree: dict[str, Any] = {"spread": False, "groups": [], "state": {}}
    if attachment is not None and attachment.shards is not None:
        tree["spread"] = True
        tree["state"] = _parts(
            key, optimizer, attachment.shards, names=names, keep=keep, tensors=found.tensors
        )
        groups = optimizer.param_groups
        extra: dict[str, Any] = {}
    elif attachment is not None and attachment.fully:
        flat = {
            id(parameter): name
            for group, line in zip(optimizer.param_groups, own, strict=True)
            for parameter, name in zip(group["params"], line, strict=True)
        }
        for parameter, entries in optimizer.state.items():
            name = flat[id(parameter)]
            tree["state"][name] = _entries(f"{key}/{name}", entries, keep)
        groups, extra = optimizer.param_groups, {}
    else:
        told = optimizer.state_dict()
        order = {
            index: name
            for group, line in zip(told["param_groups"], own, strict=True)
            for index, name in zip(group["params"], line, strict=True)
        }
        for index, entries in told["state"].items():
            if index in order:
                tree["state"][order[index]] = _entries(f"{key}/{order[index]}", entries, keep)
            else:
                raise CheckpointError(
                    f"The state of {key!r} has an entry for {index!r}, which is none of its parameters.",
                    fix="Give an optimizer whose state is by parameter.",
                )
        groups = told["param_groups"]
        extra = {name: value for name, value in told.items() if name not in ("state", "param_groups")}
    found.kept_until_step |= set(found.tensors) - before  # a schedule may change what is in the groups
    for number, (group, line) in enumerate(zip(groups, own, strict=True)):
        rest = {name: value for name, value in group.items() if name != "params"}
        tree["groups"].append({"params": line, "rest": encode(f"{key}/group-{number}", rest, keep)})
    tree["extra"] = encode(f"{key}/extra", extra, keep)
    return tree


def loaded(
    key: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    trees: Sequence[Mapping[str, Any]],
    read: Callable[..., torch.Tensor],
) -> dict[str, Any]:
    """What the optimizer's ``load_state_dict`` takes.

    Args:
        key: of the optimizer in the state.
        optimizer: it.
        names: see :func:`names_of`.
        trees: what :func:`collect` gave on each rank that has something of its own.
        read: gives a saved tensor, which lies in memory as the one given beside it, if one is.

    Raises:
        CheckpointError: the optimizer has other parameters.
    """
    own = [
        [_name(names, number, place, parameter) for place, parameter in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]
    saved = trees[0]["groups"]
    if [sorted(group["params"]) for group in saved] != [sorted(line) for line in own]:
        there, here = sum(len(group["params"]) for group in saved), sum(map(len, own))
        raise CheckpointError(
            f"The checkpoint's {key!r} has {there} parameters in {len(saved)} groups, this one {here} in "
            f"{len(own)}, or they have other names.",
            fix="Build the optimizer as it was when the checkpoint was written.",
        )
    index = {name: place for place, name in enumerate(name for line in own for name in line)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for tree in trees:
        for name, entries in tree["state"].items():
            if index[name] not in state:
                line = _line(read, parameters[index[name]])
                state[index[name]] = {entry: decode(value, line) for entry, value in entries.items()}
    groups = [
        {**decode(group["rest"], read), "params": [index[name] for name in line]}
        for group, line in zip(saved, own, strict=True)
    ]
    return {**decode(trees[0]["extra"], read), "state": dict(sorted(state.items())), "param_groups": groups}


def _entries(path: str, entries: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    return {name: encode(f"{path}/{name}", value, keep) for name, value in entries.items()}


def _parts(
    key: str,
    optimizer: Optimizer,
    shards: Any,
    *,
    names: Mapping[int, str],
    keep: Keep,
    tensors: MutableMapping[str, Any],
) -> dict[str, Any]:
    """This rank's pieces, cut at the borders of the parameters."""
    numbers = {
        id(parameter): (number, place)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }
    found: dict[str, Any] = {}
    for _, pieces in shards.shares:
        for piece in pieces:
            entries: Any = optimizer.state.get(piece.parameter) or None
            for member in piece.members if entries else ():
                number, place = numbers[id(member.parameter)]
                name = _name(names, number, place, member.parameter)
                path, told = f"{key}/{name}", {}
                start, stop = member.within(piece.start, piece.stop)
                for entry, value in entries.items():
                    if not pieces.is_row(piece, entry, value):
                        told[entry] = encode(f"{path}/{entry}", value, keep)
                        continue
                    full = f"{path}/{entry}"
                    row = value.detach()[start - piece.start : stop - piece.start]
                    total = member.stop - member.start  # 0: it lies nowhere, and every rank has it
                    tensors[full] = Part(row, start - member.start if total else 0, total)
                    told[entry] = {
                        "tensor": full,
                        "own": False,
                        "shape": list(member.parameter.shape),
                        "stride": list(member.stride),
                    }
                found[name] = told
    return found


def _line(
    read: Callable[..., torch.Tensor], parameter: torch.Tensor
) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """Reads tensors of a parameter's state, those too that were saved as a line in the order of memory."""

    def whole(told: Mapping[str, Any]) -> torch.Tensor:
        if "stride" not in told:
            return read(told, None if hasattr(parameter, "full_tensor") else parameter)
        return read(told).as_strided(told["shape"], told["stride"])

    return whole


def _name(names: Mapping[int, str], number: int, place: int, parameter: torch.Tensor) -> str:
    return names.get(id(parameter), f"group-{number}/{place}")
