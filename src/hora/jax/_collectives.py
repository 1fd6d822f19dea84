"""Collectives that combine arrays: allreduce and reducescatter, of pytrees.

The same call on every rank, in the same order: outside of ``jit``, or inside :func:`hora.spmd` or
``shard_map``. Every function takes a pytree of arrays and numbers, and returns one of the same form;
numbers and NumPy arrays come back as JAX arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.jax import _host, _traced
from hora.jax._compression import Compression, Compressor
from hora.jax._context import required
from hora.jax._leaves import Tree, check_reduction
from hora.jax._process_sets import ProcessSet, global_process_set, member_set
from hora.jax._reduce import Reduction

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allreduce",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reduce_tree",
    "reducescatter",
]

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def allreduce(
    value: Any,
    *,
    op: ReduceOp = ReduceOp.Average,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine the arrays of all ranks element by element; every rank gets the result, bit by bit the same.

    Small arrays of a pytree travel together, in one message for each dtype. Half precision is added
    up in float32 and rounded once. Inside ``jit`` it has a gradient.

    Args:
        value: a pytree; the same structure, shapes and dtypes on every rank.
        op: ``Average`` (floating and complex), ``Sum``, ``Product`` (and whole numbers), ``Min``, ``Max``
            (and bool), ``Adasum`` (floating; array by array; 2, 4, 8, ... ranks).
        name: appears in the timeline and in messages.
        compression: how floating arrays travel: ``Compression.fp16`` or ``bf16``.
        prescale_factor: multiplies each rank's arrays before; floating and complex arrays only.
        postscale_factor: multiplies the result; as ``prescale_factor``.
        process_set: the ranks that take part. Outside of ``jit`` only they call. Inside, all ranks of the
            program do, and the others get their own arrays back.

    Raises:
        CollectiveError: a dtype that ``op`` has no meaning for, or a call that is traced by plain ``jit``.
    """
    return reduce_tree(
        value,
        function="allreduce",
        op=op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce(values: Sequence[Any], **options: Any) -> list[Any]:
    """:func:`allreduce` of a list, under Horovod's name; arguments as there."""
    results: list[Any] = list(allreduce(list(values), **options))
    return results


def reducescatter(
    value: Any,
    *,
    op: ReduceOp = ReduceOp.Average,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine the arrays of all ranks element by element; each rank gets some rows of the result.

    The rows are shared in the order of ranks. Outside of ``jit`` the first ranks get one more where they do
    not divide evenly; inside they have to. Ranks may come late by any time: see :func:`hora.allreduce` for
    the rest.

    Args:
        value: a pytree of arrays of one dimension or more; the same on every rank but for its values.
        op: as for :func:`allreduce`, without ``Adasum``.
        name: appears in the timeline and in messages.
        compression: how floating arrays travel.
        prescale_factor: multiplies each rank's arrays before.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; only they call.

    Raises:
        CollectiveError: a dtype, shape, operation or process set that this cannot take.
    """
    context = required("reducescatter")
    inside = _traced.is_inside()
    members = member_set(process_set, function="reducescatter", inside=inside)
    if op is ReduceOp.Adasum:
        raise CollectiveError("reducescatter has no Adasum.", fix="Write op=hora.Sum, or use hora.allreduce.")
    tree = Tree(value, function="reducescatter")
    small, contexts = _compressed(tree.arrays, compression)
    reduction = _reduction(
        tree.arrays,
        small,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        members=members,
        function="reducescatter",
    )
    for array in small:
        if array.ndim == 0:
            raise CollectiveError(
                "reducescatter shares rows, but an array has no dimensions.", fix="Use hora.allreduce(value)."
            )
    if inside:
        if _traced.mask(members, context) is not None:
            raise CollectiveError(
                "reducescatter inside jit shares rows among all ranks of the mesh.",
                fix="Leave process_set= out, or call hora.reducescatter() outside of jit.",
            )
        results = [_traced.reducescatter(array, reduction) for array in small]
    else:
        _traced.require_host(tree.arrays, "reducescatter")
        index = members.members.index(context.world.rank)
        details = _details(reduction)
        with context.collective(Kind.REDUCESCATTER, small, members, name=name, **details):
            results = _host.reducescatter(small, reduction, context.places(members), index)
    return tree.made_of(
        [compression.decompress(result, ctx) for result, ctx in zip(results, contexts, strict=True)]
    )


def grouped_reducescatter(values: Sequence[Any], **options: Any) -> list[Any]:
    """:func:`reducescatter` of a list, under Horovod's name; arguments as there."""
    results: list[Any] = list(reducescatter(list(values), **options))
    return results


def reduce_tree(
    value: Any,
    *,
    function: str,
    op: ReduceOp,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """:func:`allreduce`, on behalf of ``function``."""
    context = required(function)
    inside = _traced.is_inside()
    members = member_set(process_set, function=function, inside=inside)
    tree = Tree(value, function=function)
    small, contexts = _compressed(tree.arrays, compression)
    reduction = _reduction(
        tree.arrays,
        small,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        members=members,
        function=function,
    )
    if inside:
        results = _traced.allreduce(small, reduction, _traced.mask(members, context))
    else:
        _traced.require_host(tree.arrays, function)
        kind = Kind.ALLREDUCE.value if function == "allreduce" else function
        with context.collective(kind, small, members, name=name, **_details(reduction)):
            results = _host.allreduce(small, reduction, context.places(members)) if small else []
    return tree.made_of(
        [compression.decompress(result, ctx) for result, ctx in zip(results, contexts, strict=True)]
    )


def _compressed(arrays: Sequence[Any], compression: Any) -> tuple[list[Any], list[Any]]:
    pairs = [compression.compress(array) for array in arrays]
    return [array for array, _ in pairs], [context for _, context in pairs]


def _reduction(
    given: Sequence[Any],
    small: Sequence[Any],
    *,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    members: ProcessSet,
    function: str,
) -> Reduction:
    check_reduction(small, op, len(members.members), function=function)
    scaled = (prescale, postscale) != (1.0, 1.0)
    if scaled and any(not jnp.issubdtype(array.dtype, jnp.inexact) for array in small):
        raise CollectiveError(
            f"{function}: prescale_factor and postscale_factor are for floating and complex arrays.",
            fix="Multiply whole numbers yourself, before or after.",
        )
    narrow = any(one.dtype != other.dtype for one, other in zip(given, small, strict=True))
    return Reduction(op=op, prescale=float(prescale), postscale=float(postscale), narrow=narrow)


def _details(reduction: Reduction) -> dict[str, Any]:
    details: dict[str, Any] = {"operation": reduction.op.value}
    if (reduction.prescale, reduction.postscale) != (1.0, 1.0):
        details["factors"] = (reduction.prescale, reduction.postscale)
    return details
