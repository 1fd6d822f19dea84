"""Means over all ranks, weighted by what each mean is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import jax
import numpy as np

from hora.adapter import metrics
from hora.core.errors import CollectiveError
from hora.jax._context import required

__all__ = ["mean"]


@overload
def mean(value: Mapping[str, Any], weight: Any = 1.0) -> dict[str, float]: ...
@overload
def mean(value: Any, weight: Any = 1.0) -> float: ...


def mean(value: Any, weight: Any = 1.0) -> float | dict[str, float]:
    """The mean over all ranks, where each rank's value counts ``weight`` times.

    Give the number of samples as the weight and the result is the mean over samples, however unevenly they
    are spread: ``hora.mean(loss, weight=len(x))``. Sums and weights are added up in float64 in one message,
    outside of JAX. A global array that is the same on all ranks may be given.

    Args:
        value: a number, an array of one element, or a mapping of names to such.
        weight: how much this rank's values count, 0 or more. A value of weight 0 is ignored, even nan.

    Returns:
        A float, or a dict of floats with the keys of ``value``; nan where all weights are 0.

    Raises:
        CollectiveError: a value of several elements, a negative weight, or, on every rank, names that differ
            between ranks.
    """
    context = required("mean")
    values = value if isinstance(value, Mapping) else {"value": value}
    numbers = {name: _number(name, each) for name, each in values.items()}
    means = metrics.mean(context, numbers, _number("weight", weight))
    return means if isinstance(value, Mapping) else means["value"]


def _number(name: str, value: Any) -> float:
    if isinstance(value, jax.Array) and not value.is_fully_addressable and value.is_fully_replicated:
        value = value.addressable_data(0)
    if np.size(value) != 1:
        raise CollectiveError(
            f"mean: {name} is an array of shape {np.shape(value)}, not one number.",
            fix="Reduce it on this rank first: value.mean(), with its number of elements as the weight.",
        )
    return float(np.asarray(value).reshape(()))
