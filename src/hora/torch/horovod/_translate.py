"""Between requests and what travels: what the other ranks must agree with, what a joined rank gives, and
several requests as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.adapter.negotiation.match import Ask, Key
from hora.adapter.ops import Kind, ReduceOp
from hora.torch._context import Context
from hora.torch._execute import execute
from hora.torch._process_sets import global_process_set
from hora.torch._request import Request

__all__ = ["describe", "run_together", "zeros"]


def describe(request: Request) -> Ask:
    """What the other ranks must agree with."""
    tensors = request.tensors
    kind = request.kind
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    splits = None
    if kind is Kind.ALLTOALL:
        size = len(request.process_set.members)
        splits = (
            tuple(request.splits.tolist())
            if request.splits is not None
            else (tensors[0].shape[0] // size,) * size
        )
    return Ask(
        kind=kind.value,
        op=request.op.value if reduces else "",
        prescale=float(request.prescale) if reduces else 1.0,
        postscale=float(request.postscale) if reduces else 1.0,
        root=request.root if kind is Kind.BROADCAST else 0,
        device="GPU" if any(tensor.is_cuda for tensor in tensors) else "CPU",
        tensors=tuple((str(tensor.dtype)[len("torch.") :], tuple(tensor.shape)) for tensor in tensors),
        splits=splits,
        grouped=request.grouped,
    )


def zeros(key: Key, ask: Ask, context: Context, *, own_group: dist.ProcessGroup) -> Request:
    """What a joined rank contributes; ``own_group`` carries what concerns all ranks."""
    device = context.device if ask.device == "GPU" else torch.device("cpu")
    process_set = context.process_sets[key[0]] if key[0] else global_process_set
    return Request(
        kind=Kind(ask.kind),
        tensors=[
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in ask.tensors
        ],
        op=ReduceOp(ask.op) if ask.op else ReduceOp.Sum,
        prescale=ask.prescale,
        postscale=ask.postscale,
        process_set=process_set,
        grouped=ask.grouped,
        own_group=None if key[0] else own_group,
    )


def run_together(requests: Sequence[Request]) -> list[Any]:
    """Several operations as one of the engine; their results, each into its own outputs."""
    first = requests[0]
    joint = Request(
        kind=first.kind,
        name=first.name,
        tensors=[request.tensors[0] for request in requests],
        op=first.op,
        prescale=first.prescale,
        postscale=first.postscale,
        root=first.root,
        process_set=first.process_set,
        grouped=True,
        scaled_apart=first.scaled_apart,
        own_group=first.own_group,
    )
    if all(request.outputs is not None for request in requests):
        joint.outputs = [request.outputs[0] for request in requests]  # type: ignore[index]
        return list(execute(joint))
    results = []
    with torch.no_grad():
        for request, result in zip(requests, execute(joint), strict=True):
            if request.outputs is not None:
                request.outputs[0].copy_(result)
                results.append(request.outputs[0])
            else:
                results.append(result.clone())  # not a view that keeps the whole batch alive
    return results
