"""Objects over the ranks, join, process sets, the timeline and who this worker is, in Horovod's words."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hora.adapter.negotiation import objects
from hora.adapter.negotiation import session as shared
from hora.adapter.ops import ReduceOp
from hora.core.errors import NotInitializedError
from hora.tensorflow._checks import operation
from hora.tensorflow._context import current
from hora.tensorflow._process_sets import ProcessSet, global_process_set
from hora.tensorflow._process_sets import process_set_included as _included
from hora.tensorflow.horovod._operations import allgather, as_horovod, broadcast, broadcast_variables
from hora.tensorflow.horovod._session import session

__all__ = [
    "BroadcastGlobalVariablesHook",
    "add_process_set",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "join",
    "local_rank",
    "local_size",
    "process_set_included",
    "rank",
    "remove_process_set",
    "size",
    "start_timeline",
    "stop_timeline",
]


def _in_horovods_words(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(function)
    def wrapped() -> Any:
        try:
            return function()
        except NotInitializedError:
            session(name)
            raise

    return wrapped


rank = _in_horovods_words("rank", current.rank)
size = _in_horovods_words("size", current.size)
local_rank = _in_horovods_words("local_rank", current.local_rank)
local_size = _in_horovods_words("local_size", current.local_size)
cross_rank = _in_horovods_words("cross_rank", current.cross_rank)
cross_size = _in_horovods_words("cross_size", current.cross_size)
is_homogeneous = _in_horovods_words("is_homogeneous", current.is_homogeneous)
process_set_included = as_horovod(_included)


def join(name: str | None = None, ignore_name_scope: bool = False) -> Any:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Until then it takes part in the others' ``allreduce`` with zeros; ``Average`` divides by the number of
    all ranks as before. Other operations of theirs fail, except ``barrier``.

    Args:
        name: accepted for compatibility.
        ignore_name_scope: likewise.

    Returns:
        The rank that joined last, as an int32 tensor.
    """
    client = session("join").client
    if tf.executing_eagerly():
        return tf.constant(client.join(), tf.int32)
    last = tf.py_function(lambda: tf.constant(client.join(), tf.int32), [], tf.int32, name=name)
    last.set_shape([])
    return last


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of ``root_rank``, on every rank; that rank gets its own object back.

    Args:
        obj: anything that cloudpickle (where it is installed) or pickle takes; ignored on other ranks.
        root_rank: whose object all ranks get.
        session: of TensorFlow 1; accepted for compatibility.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    mine = rank() == root_rank
    with tf.init_scope():
        data = objects.pickled(obj) if mine else b""
        length = int(
            broadcast(
                tf.constant(len(data), tf.int64),
                root_rank,
                objects.part(name, "length"),
                process_set=process_set,
            )
        )
        if length == 0:
            raise objects.refusal(root_rank)
        wire = tf.constant(np.frombuffer(data, np.uint8) if mine else np.zeros(length, np.uint8))
        sent = broadcast(wire, root_rank, objects.part(name, "bytes"), process_set=process_set)
    return obj if mine else pickle.loads(sent.numpy().tobytes())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """:func:`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Args:
        obj: anything that cloudpickle (where it is installed) or pickle takes.
        session: of TensorFlow 1; accepted for compatibility.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    with tf.init_scope():
        data = objects.pickled(obj)
        lengths = allgather(
            tf.constant([len(data)], tf.int64), objects.part(name, "lengths"), process_set=process_set
        )
        wire = tf.constant(np.frombuffer(data, np.uint8))
        gathered = allgather(wire, objects.part(name, "bytes"), process_set=process_set).numpy()
    counts = lengths.numpy().tolist()
    if 0 in counts:
        raise objects.refusal(process_set.members[counts.index(0)])
    return [pickle.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(counts)[:-1])]


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


def broadcast_global_variables(root_rank: int) -> Any:
    """In a graph of TensorFlow 1, give all ranks the global variables of one.

    Raises:
        RuntimeError: called eagerly, where there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "hvd.broadcast_variables(<model/optimizer variables>) instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks the global variables of one when a session of TensorFlow 1 begins.

    Args:
        root_rank: whose variables all ranks get.
        device: accepted for compatibility.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """The graph is complete."""
        self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """The variables are there."""
        session.run(self.bcast_op)


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The operation that the arguments ``op`` and ``average`` mean together.

    Raises:
        ValueError: both are given.
    """
    return operation(average, op, function="allreduce")


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
