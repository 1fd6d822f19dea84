"""State and objects over the ranks, join, process sets and the timeline, on negotiated operations."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hora.adapter.negotiation import objects
from hora.adapter.negotiation import session as shared
from hora.adapter.ops import Kind
from hora.torch import _process_sets, _state
from hora.torch._process_sets import ProcessSet, global_process_set
from hora.torch._request import Request
from hora.torch.horovod._operations import broadcast_async_, synchronize
from hora.torch.horovod._session import session

__all__ = [
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "get_process_set_ids_and_ranks",
    "is_homogeneous",
    "join",
    "remove_process_set",
    "start_timeline",
    "stop_timeline",
]

Parameters = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]

_FAILED = b""
"""Sent in place of a pickle by a rank whose object has none, so that nobody waits for it."""


def is_homogeneous() -> bool:
    """Whether every host has the same number of workers."""
    context = session("is_homogeneous").context
    return context.world.local_size * max(1, context.world.host_count) == context.world.size


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Until then it takes part in the others' ``allreduce`` with zeros; ``Average`` divides by the number of
    all ranks as before. Other operations of theirs fail, except ``barrier``.

    Args:
        device: accepted for compatibility; zeros are made where the tensors of the others are.

    Returns:
        The rank that joined last.
    """
    current = session("join")
    last = current.client.join()
    if current.context.watch is not None:
        current.context.watch.rejoined()
    return last


def broadcast_parameters(
    params: Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with those of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors. Entries that are
            no tensors are left alone.
        root_rank: whose values all ranks get.
        process_set: the ranks that take part.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = [*sorted(params.items())]
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor | torch.nn.Module):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(  # noqa: TRY004 - as Horovod
            f"broadcast_parameters takes model.state_dict() or a list of parameters, not a "
            f"{type(params).__name__}."
        )
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name, process_set)
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank's optimizer the state and the hyper-parameters of ``root_rank``'s.

    It works on fresh and on restored optimizers alike, of every class, and runs no step.

    Args:
        optimizer: of the same parameter groups on every rank; wrapped or not.
        root_rank: whose state all ranks get.
        model: accepted for compatibility.
    """
    context = session("broadcast_optimizer_state").context
    mine = context.world.rank == root_rank
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors: list[torch.Tensor] = []
    state: Any = None
    groups: Any = None
    if mine:
        state = [_state._detach(optimizer.state.get(parameter), tensors) for parameter in parameters]
        groups = [
            {key: _state._detach(value, tensors) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    blanks = [_state._Blank.of(tensor) for tensor in tensors]
    theirs, state, groups, blanks = broadcast_object((lengths, state, groups, blanks), root_rank)
    if theirs != lengths:
        raise ValueError(
            f"broadcast_optimizer_state: rank {root_rank} has parameter groups of {theirs} parameters, and "
            f"rank {context.world.rank} of {lengths}. Build the same optimizer on every rank."
        )
    if not mine:
        tensors = [blank.tensor(context.device) for blank in blanks]
    broadcast_parameters(tensors, root_rank)
    if mine:
        return
    optimizer.state.clear()
    for parameter, entry in zip(parameters, state, strict=True):
        if entry is not None:
            optimizer.state[parameter] = _state._attach(entry, tensors)
    for group, entry in zip(optimizer.param_groups, groups, strict=True):
        for key, value in entry.items():
            group[key] = _state._kept(group.get(key), _state._attach(value, tensors))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of ``root_rank``, on every rank; that rank gets its own object back.

    Args:
        obj: anything that cloudpickle (where it is installed) or pickle takes; ignored on other ranks.
        root_rank: whose object all ranks get.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    context = session("broadcast_object").context
    mine = context.world.rank == root_rank
    data = objects.pickled(obj) if mine else b""
    length = torch.tensor([len(data)], dtype=torch.int64)
    size = int(synchronize(broadcast_async_(length, root_rank, objects.part(name, "length"), process_set)))
    if size == 0:
        raise objects.refusal(root_rank)
    wire = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if mine else torch.empty(size, dtype=torch.uint8)
    )
    synchronize(broadcast_async_(wire, root_rank, objects.part(name, "bytes"), process_set))
    return obj if mine else pickle.loads(wire.numpy().tobytes())


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """:func:`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank=root_rank, name=name, process_set=process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Args:
        obj: anything that cloudpickle (where it is installed) or pickle takes.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    current = session("allgather_object")
    data = objects.pickled(obj)
    wire = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    request = Request(
        kind=Kind.ALLGATHER, name=objects.part(name, "bytes"), tensors=[wire], process_set=process_set
    )
    _process_sets.member_set(process_set, function="allgather_object")
    gathered: torch.Tensor = current.client.submit(request).wait()
    assert request.rows is not None
    lengths = request.rows[0]
    if 0 in lengths:
        raise objects.refusal(process_set.members[lengths.index(0)])
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(gathered, lengths)]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable after ``init``. All ranks call it, in the same order.

    Args:
        process_set: a :class:`ProcessSet`, or the ranks of a new one.

    Raises:
        ValueError: process sets are not dynamic, or such a set exists or cannot exist.
        HorovodInternalError: the ranks give different sets.
    """
    made = session("add_process_set")
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    shared.add_process_set(made, added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set. All ranks call it, in the same order.

    Returns:
        Whether it was removed: False for the set of all ranks, and for one that is not in use.

    Raises:
        ValueError: process sets are not dynamic.
    """
    return shared.remove_process_set(session("remove_process_set"), process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each process set in use, by its id."""
    return shared.ids_and_ranks(session("get_process_set_ids_and_ranks"))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the operations from now on; rank 0 writes them to a file as a Chrome trace.

    Args:
        file_path: where rank 0 writes.
        mark_cycles: whether each release of operations is marked.
    """
    shared.start_timeline(session("start_timeline"), file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Write the timeline that was started."""
    session("stop_timeline").trace.stop()
