"""Metrics over all ranks: states are added up, and the result is that of one worker on all samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hora.core.errors import CollectiveError
from hora.keras._backend import api

__all__ = ["average", "evaluate", "results"]


def evaluate(model: Any, *args: Any, **options: Any) -> dict[str, float]:
    """``model.evaluate`` on each rank's share of the data, and the metrics over all of them.

    A metric of Keras keeps sums and counts; those of all ranks are added up before the result is made of
    them. So it is what one worker would find on all samples, however unevenly they are spread; for AUC or
    recall too, which no mean over the ranks gives.

    Args:
        model: a compiled model.
        args: as those of ``model.evaluate``: this rank's share, as ``hora.data_loader(..., tail="uneven")``.
        options: as those of ``model.evaluate``, without ``return_dict``.

    Returns:
        The metrics by name, the same on every rank.
    """
    model.evaluate(*args, **options, return_dict=True)
    return results(model)


def results(model: Any, process_set: Any = api.global_process_set) -> dict[str, float]:
    """What the model's metrics say about the samples of all ranks; their states are left as they are."""
    variables = list({id(each): each for metric in model.metrics for each in metric.variables}.values())
    mine = [keras.ops.convert_to_numpy(variable.value) for variable in variables]
    everyone = _exchanged(
        [array.astype(_wide(array)) for array in mine], "metrics", len(variables), process_set
    )
    try:
        for index, variable in enumerate(variables):
            if variable.aggregation == "sum":
                variable.assign(sum(theirs[index] for theirs in everyone).astype(mine[index].dtype))
        return _plain(model.get_metrics_result())
    finally:
        for variable, array in zip(variables, mine, strict=True):
            variable.assign(array)


def average(values: Mapping[str, float], process_set: Any = api.global_process_set) -> dict[str, float]:
    """The mean over the ranks of each value, in float64; each rank's counts the same."""
    names = sorted(values)
    everyone = _exchanged([names, [float(values[name]) for name in names]], "values", None, process_set)
    if any(theirs[0] != names for theirs in everyone):
        raise CollectiveError(
            f"The logs of the ranks have different names; rank {api.rank()} has {names}.",
            fix="Compile the same metrics on every rank, and validate on all ranks or on none.",
        )
    return {
        name: sum(theirs[1][index] for theirs in everyone) / len(everyone) for index, name in enumerate(names)
    }


def _exchanged(mine: list[Any], what: str, count: int | None, process_set: Any) -> list[list[Any]]:
    everyone: list[list[Any]] = api.allgather_object(mine, name=what, process_set=process_set)
    if count is not None and any(len(theirs) != count for theirs in everyone):
        raise CollectiveError(
            f"The metrics of the ranks differ: they keep {[len(theirs) for theirs in everyone]} variables.",
            fix="Compile the model with the same metrics on every rank.",
        )
    return everyone


def _wide(array: Any) -> Any:
    return np.float64 if np.issubdtype(array.dtype, np.floating) else array.dtype


def _plain(values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _plain(value)
        else:
            found[name] = float(keras.ops.convert_to_numpy(value))
    return found
