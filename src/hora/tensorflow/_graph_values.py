"""Who this worker is, as tensors: what they say is asked when the graph runs, not when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hora.core.errors import CollectiveError
from hora.tensorflow._autograph import unconverted
from hora.tensorflow._context import current, required

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


@unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of workers in the job, or in a process set, as an int32 tensor."""
    return _asked(lambda: len(_members(process_set_id)), name)


@unconverted
def rank_op(name: str | None = None) -> Any:
    """This worker's rank, as an int32 tensor."""
    return _asked(current.rank, name)


@unconverted
def local_size_op(name: str | None = None) -> Any:
    """The number of workers on this worker's host, as an int32 tensor."""
    return _asked(current.local_size, name)


@unconverted
def local_rank_op(name: str | None = None) -> Any:
    """This worker's rank on its host, as an int32 tensor."""
    return _asked(current.local_rank, name)


@unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this worker is in the process set and 0 if not, as an int32 tensor. Of a set that does not exist,
    Horovod's numbers: -2, and -1 before ``init()``.
    """

    def included() -> int:
        if not current.is_initialized():
            return -1
        try:
            return int(required("process_set_included_op").world.rank in _members(process_set_id))
        except CollectiveError:
            return -2

    return _asked(included, name)


def _members(process_set_id: int) -> list[int]:
    context = required("size_op")
    if process_set_id == 0:
        return context.everyone.members
    found = context.process_sets.get(int(process_set_id))
    if found is None:
        raise CollectiveError(
            f"There is no process set with id {process_set_id!r}.",
            fix="Use the process_set_id of one that was added.",
        )
    members: list[int] = found.members
    return members


def _asked(question: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(question(), tf.int32)
    answer = tf.py_function(lambda: tf.constant(question(), tf.int32), [], tf.int32, name=name)
    answer.set_shape([])
    return answer
