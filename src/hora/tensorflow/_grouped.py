"""Several tensors reduced as one operation, for the user or as the gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hora.adapter.ops import Kind, ReduceOp
from hora.tensorflow import _autograd
from hora.tensorflow._checks import check_reduction, dense_group
from hora.tensorflow._compression import BF16Compressor, Compressing, FP16Compressor
from hora.tensorflow._context import required
from hora.tensorflow._process_sets import ProcessSet, member_set
from hora.tensorflow._request import Request
from hora.tensorflow._watch import Steps

__all__ = ["NARROW", "reduce_group"]

NARROW = (FP16Compressor, BF16Compressor)


def reduce_group(
    tensors: Sequence[Any],
    *,
    op: ReduceOp,
    compression: Compressing,
    prescale_factor: float,
    postscale_factor: float,
    name: str | None = None,
    process_set: ProcessSet,
    training: Steps | None = None,
    names: Sequence[str] = (),
) -> list[Any]:
    """:func:`grouped_allreduce`; with ``training`` of a step's gradients, of variables of these names."""
    function = "grouped_allreduce"
    required(function)
    member_set(process_set, function=function)
    if isinstance(tensors, Sequence):
        tensors = [
            tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in tensors
        ]
    given = dense_group(tensors, function=function)
    if not given:
        return []
    check_reduction(given, op, process_set, function=function)
    small, contexts = zip(*(compression.compress(tensor) for tensor in given), strict=True)
    request = Request(
        kind=Kind.ALLREDUCE,
        tensors=list(small),
        name=name,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        process_set=process_set,
        grouped=True,
        narrow=compression in NARROW,
        training=training,
        names=tuple(names),
    )
    return [
        compression.decompress(result, context)
        for result, context in zip(_autograd.run(request), contexts, strict=True)
    ]
