"""Variables over the ranks: all start from those of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hora.adapter.agreement import require_same
from hora.adapter.arguments import check_root
from hora.adapter.ops import Kind
from hora.core.errors import CollectiveError
from hora.tensorflow._autograph import unconverted
from hora.tensorflow._context import required
from hora.tensorflow._process_sets import ProcessSet, global_process_set, member_set
from hora.tensorflow._request import Request, Tensor, dispatcher, run

__all__ = ["broadcast_", "broadcast_variables"]


@unconverted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give all ranks the values of one rank's variables.

    Call it once the model and the optimizer are built, before the first step: ``model.variables`` and
    ``optimizer.variables``. Eagerly, the variables of all ranks are compared first, and what differs is
    named.

    Args:
        variables: of TensorFlow or Keras, in the same order and of the same shapes on all ranks.
        root_rank: whose values all get; counted in the whole job.
        process_set: the ranks that take part; only they call.
        inplace: accepted for scripts written for Horovod.

    Returns:
        In a graph, an operation that does it; None otherwise.

    Raises:
        CollectiveError: on every rank, variables that differ between the ranks in number, shape or dtype.
    """
    function = "broadcast_variables"
    context = required(function)
    member_set(process_set, function=function)
    check_root(root_rank, context, function=function, process_set=process_set)
    found = list(variables)
    eager = tf.executing_eagerly()
    if eager and not dispatcher().as_horovod:
        require_same(
            [f"{tuple(each.shape)} {_dtype_name(each)}" for each in found],
            context,
            function=function,
            what="The variables",
            fix="Build the same model and optimizer on all ranks, and give their variables in one order.",
            error=CollectiveError,
            process_set=process_set,
        )
    assigned = _assign_all(found, root_rank, process_set, name=None)
    return None if eager else tf.group(*assigned)


@unconverted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give all ranks the values of one rank's variables; the variables, or in a graph their new values."""
    function = "broadcast_"
    context = required(function)
    member_set(process_set, function=function)
    check_root(root_rank, context, function=function, process_set=process_set)
    if not all(hasattr(each, "assign") for each in variables):
        odd = next(each for each in variables if not hasattr(each, "assign"))
        raise CollectiveError(
            f"broadcast_ takes variables, which it changes, not {type(odd).__name__}.",
            fix="Write hora.broadcast(tensor, root_rank), which returns the result.",
        )
    return _assign_all(list(variables), root_rank, process_set, name=name)


def _assign_all(
    variables: list[Any], root_rank: int, process_set: ProcessSet, *, name: str | None
) -> list[Any]:
    if not variables:
        return []
    values = run(
        Request(
            kind=Kind.BROADCAST,
            tensors=[_value(each) for each in variables],
            name=name,
            root=root_rank,
            process_set=process_set,
            grouped=True,
        )
    )
    assigned = [each.assign(value) for each, value in zip(variables, values, strict=True)]
    return variables if tf.executing_eagerly() else [each for each in assigned if each is not None]


def _value(variable: Any) -> Tensor:
    """A Keras variable has its value as an attribute, one of TensorFlow 1 as a method."""
    value = getattr(variable, "value", variable)
    return tf.convert_to_tensor(value() if callable(value) else value)


def _dtype_name(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))
