"""Means over all ranks, weighted by what each mean is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hora.adapter import metrics
from hora.core.errors import CollectiveError
from hora.tensorflow._context import required

__all__ = ["mean"]


def mean(value: Any, weight: Any = 1.0) -> Any:
    """The mean over all ranks, where each rank's value counts ``weight`` times. Not inside a ``tf.function``.

    Give the number of samples as the weight and the result is the mean over samples, however unevenly they
    are spread: ``hora.mean(loss, weight=len(batch))``.

    Args:
        value: a number, a tensor of one element, or a mapping of names to such.
        weight: how much this rank's values count, 0 or more. A value of weight 0 is ignored, even nan.

    Returns:
        A float, or a dict of floats with the keys of ``value``; nan where all weights are 0.

    Raises:
        CollectiveError: a value of several elements, a negative weight, or, on every rank, names that
            differ between ranks.
    """
    context = required("mean")
    values = value if isinstance(value, Mapping) else {"": value}
    numbers = {name: _number(name or "value", each) for name, each in values.items()}
    means = metrics.mean(context, numbers, _number("weight", weight))
    return means if isinstance(value, Mapping) else means[""]


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shape = getattr(value, "shape", None)
        raise CollectiveError(
            f"mean: {name} is not one number, but {type(value).__name__}"
            + (f" of shape {tuple(shape)}." if shape is not None and shape.rank is not None else "."),
            fix="Reduce it on this rank first: tf.reduce_mean(value), with its number of elements as the "
            "weight; and call hora.mean outside of tf.function.",
        ) from error
