"""Starting all ranks from the same state: parameters, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hora.adapter.arguments import check_root
from hora.adapter.guard import collective
from hora.core.errors import CollectiveError
from hora.torch._agree import require_same
from hora.torch._context import Context, required
from hora.torch._objects import gather_objects, send_object
from hora.torch._process_sets import global_process_set
from hora.torch._wire import as_bytes

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

CHUNK_MB = 64
"""Tensors are joined into messages of about this size: enough to be fast, little extra memory."""

Parameters = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def broadcast_parameters(parameters: Parameters, root_rank: int = 0) -> None:
    """Overwrite parameters and buffers with those of ``root_rank``, on every rank.

    Args:
        parameters: a module (its buffers, such as the statistics of batch norm, are included), a
            ``state_dict``, or pairs of a name and a tensor. Tensors that are spread over the ranks
            (``DTensor``) stay as they are.
        root_rank: whose values all ranks get.

    Raises:
        CollectiveError: on every rank, naming the first difference, when names, shapes or dtypes differ
            between ranks; or when a value is not a tensor with data.
    """
    context = required("broadcast_parameters")
    check_root(root_rank, context, function="broadcast_parameters")
    named = [(name, tensor) for name, tensor in _named_tensors(parameters) if not _is_spread(tensor)]
    for name, tensor in named:
        _check(name, tensor, context)
    require_same(
        [
            f"{name} ({str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)})"
            for name, tensor in named
        ],
        context,
        function="broadcast_parameters",
        what="The parameters to broadcast",
        fix="Build the same model on every rank before broadcasting.",
        error=CollectiveError,
    )
    with context.timeline.span("broadcast_parameters", lane="collectives"):
        _broadcast_in_place([tensor for _, tensor in named], root_rank, context)
    if context.watch is not None:
        context.watch.broadcast(parameters, named)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Give every rank's optimizer the state and the hyper-parameters of ``root_rank``'s.

    It works on fresh and on restored optimizers alike and runs no step. Tensors arrive on this rank's
    device where ``root_rank`` has them on its own, and on the CPU where it has them there. The state of
    ``root_rank`` itself is not touched.

    Raises:
        CollectiveError: on every rank, when parameter groups differ in number or size.
    """
    context = required("broadcast_optimizer_state")
    check_root(root_rank, context, function="broadcast_optimizer_state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    require_same(
        [f"a group of {len(group['params'])} parameters" for group in optimizer.param_groups],
        context,
        function="broadcast_optimizer_state",
        what="The parameter groups of the optimizer",
        fix="Build the same optimizer on every rank before broadcasting.",
        error=CollectiveError,
    )
    if context.world.size == 1:
        return
    _check_spread(optimizer, context)
    mine = context.world.rank == root_rank
    tensors: list[torch.Tensor] = []
    state: Any = None
    groups: Any = None
    if mine:
        state = [_detach(optimizer.state.get(parameter), tensors) for parameter in parameters]
        groups = [
            {key: _detach(value, tensors) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
    blanks = [_Blank.of(tensor) for tensor in tensors]
    state, groups, blanks = send_object((state, groups, blanks), root_rank, context)
    if not mine:
        tensors = [blank.tensor(context.device) for blank in blanks]
    with context.timeline.span("broadcast_optimizer_state", lane="collectives"):
        _broadcast_in_place(tensors, root_rank, context)
    if mine:
        return
    optimizer.state.clear()
    for parameter, entry in zip(parameters, state, strict=True):
        if entry is not None:
            optimizer.state[parameter] = _attach(entry, tensors)
    for group, entry in zip(optimizer.param_groups, groups, strict=True):
        for key, value in entry.items():
            group[key] = _kept(group.get(key), _attach(value, tensors))


@dataclass(frozen=True)
class _Blank:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Blank:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


@dataclass(frozen=True)
class _Slot:
    """Stands in a pickled state for the tensor that travels beside it."""

    index: int


def _detach(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree with its tensors moved to ``tensors``."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return _walk(tree, take)


def _attach(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    return _walk(tree, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf)


def _walk(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        copied = {key: _walk(value, leaf) for key, value in tree.items()}
        return copied if type(tree) is dict else type(tree)(copied)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_walk(value, leaf) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_walk(value, leaf) for value in tree)
    return leaf(tree)


def _kept(old: Any, new: Any) -> Any:
    """A learning rate that is a tensor keeps its identity: compiled and captured steps read it there."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape:
        with torch.no_grad():
            return old.copy_(new)
    return new


def _named_tensors(parameters: Parameters) -> list[tuple[str, Any]]:
    if isinstance(parameters, torch.nn.Module):
        return [*parameters.named_parameters(), *parameters.named_buffers()]
    if isinstance(parameters, Mapping):
        return list(parameters.items())
    return list(parameters)


def _is_spread(tensor: object) -> bool:
    """Whether it is a ``DTensor``, which every rank has the same of, in parts."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def _check_spread(optimizer: Optimizer, context: Context) -> None:
    """Refuse a state of which each rank has a share: no rank has what the others could get."""
    attachment = getattr(optimizer, "_hora", None)
    spread = getattr(attachment, "shards", None) is not None or getattr(attachment, "fully", False)
    if spread and any(gather_objects(bool(optimizer.state), context)):
        raise CollectiveError(
            "broadcast_optimizer_state: the optimizer is sharded (shard=), so that each rank has its "
            "share of the state.",
            fix="Write optimizer.load_state_dict(state) on every rank, or broadcast before "
            "DistributedOptimizer.",
        )


def _check(name: object, tensor: object, context: Context) -> None:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise CollectiveError(
            f"broadcast_parameters: {name!r} is a {type(tensor).__name__}, not a tensor.",
            fix="Pass the module itself, or use hora.broadcast_object for other values.",
        )
    if tensor.device.type not in context.devices and not (tensor.device.type == "cpu"):
        raise CollectiveError(
            f"broadcast_parameters: {name} is on {tensor.device}, which no engine of this job reaches.",
            fix=f"Write model.to({str(context.device)!r}) first (or model.to_empty(device=...) from meta).",
        )


def _broadcast_in_place(tensors: Sequence[torch.Tensor], root_rank: int, context: Context) -> None:
    """Overwrite tensors with those of ``root_rank``, joined into few messages of bytes."""
    if context.world.size == 1:
        return
    with torch.no_grad():
        for chunk in _chunks(tensors):
            flat = torch.cat([as_bytes(tensor) for tensor in chunk])
            wire = flat if flat.device.type in context.devices else flat.to(context.device)
            with collective(context, "broadcast_parameters", [wire], root=root_rank):
                number = context.presence.call("broadcast_parameters", global_process_set)
                work = dist.broadcast(wire, root_rank, group=context.group, async_op=True)
                context.presence.wait(work, wire.device, number=number, what="broadcast_parameters")
            if context.world.rank == root_rank:
                continue
            lengths = [tensor.numel() * tensor.element_size() for tensor in chunk]
            pieces = torch.split(wire.to(flat.device), lengths)
            for tensor, piece in zip(chunk, pieces, strict=True):
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Neighbours of one kind of device, up to about 64 MB."""
    chunks: list[list[torch.Tensor]] = []
    used = 0
    for tensor in tensors:
        length = tensor.numel() * tensor.element_size()
        if length == 0:
            continue
        neighbours = bool(chunks) and chunks[-1][0].device.type == tensor.device.type
        if not neighbours or used + length > CHUNK_MB * 2**20:
            chunks.append([])
            used = 0
        chunks[-1].append(tensor)
        used += length
    return chunks
