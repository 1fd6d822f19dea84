"""Gradients of all ranks become one: which variables take part, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hora.core.errors import GradientError
from hora.keras._backend import api, engine
from hora.keras._options import Options

__all__ = ["reduce_gradients"]


def reduce_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], options: Options, *, scaled: bool = False
) -> list[Any]:
    """The gradients, combined over the ranks; works where the backend's train step runs.

    Args:
        gradients: the backend's own tensors, or None for a variable that the loss does not depend on. What is
            None on every rank stays so; where another rank has a gradient, None counts as zeros.
        variables: Keras variables, one for each.
        options: how.
        scaled: whether they may overflow, as steps that do are left out.
    """
    if api.size() == 1 or not (options.process_set.included() or engine.as_one()):
        return list(gradients)
    if len(gradients) != len(variables):
        raise GradientError(
            f"DistributedOptimizer got {len(gradients)} gradients for {len(variables)} variables.",
            fix="Give one gradient for each variable, None where there is none.",
        )
    result = list(gradients)
    local = options.is_local()
    # Float8 training writes some variables over with "gradients" that are maxima, not slopes.
    kinds: dict[Any, list[int]] = {}
    for index, variable in enumerate(variables):
        if id(variable) in local:
            if options.scale_local and result[index] is not None:
                result[index] = result[index] / options.process_set.size()
            continue
        overwritten = getattr(variable, "overwrite_with_gradient", False)
        kinds.setdefault(api.Max if overwritten else options.op, []).append(index)
    for op, places in kinds.items():
        plain = op is not options.op
        reduced = engine.reduce(
            [gradients[index] for index in places],
            [variables[index] for index in places],
            op=op,
            compression=api.Compression.none if plain else options.compression,
            prescale=1.0 if plain else 1 / options.predivide,
            postscale=1.0 if plain else options.predivide,
            sparse_as_dense=options.sparse_as_dense,
            process_set=options.process_set,
            name=options.name,
            scaled=scaled or plain,
        )
        for index, gradient in zip(places, reduced, strict=True):
            result[index] = gradient
    return result
