"""TensorFlow's cluster runtime as the engine: raw collective operations on flat tensors.

Seen with TensorFlow 2.21 on the CPU, and the reason for what is done here: an operation that fails makes all
later ones of the process fail, so whoever calls this has agreed on shapes and dtypes with the other ranks
before; an instance key is bound to one shape for life; there is no reduce-scatter; what is gathered must have
the same length on all ranks; a peer that dies is not always noticed, so there is a timeout always; and one
operation of 100 MB takes three times as long as 25 of 4 MB.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from hora.core.errors import WorldError
from hora.tensorflow._address import free_address

__all__ = ["CHUNK", "Carrier", "Engine", "Group", "is_broken", "start"]

CHUNK = 1 << 22
"""Bytes of one operation of the engine on the CPU: 100 MB took 293 ms in pieces of 4 MB, 374 in pieces of
1 MB and 912 in one (two ranks of one host)."""

JOB = "worker"

Tensor = Any


class Group(NamedTuple):
    """Ranks that take part in an operation.

    Attributes:
        number: of the process set; 0: all ranks.
        size: how many they are.
        place: this rank's among them.
    """

    number: int
    size: int
    place: int


class Carrier(Protocol):
    """What the engines have in common; see :class:`Engine`."""

    def reduce(self, flat: Tensor, merge: str, group: Group, *, divisor: int = 1) -> Tensor:
        """Elements combined over the group."""

    def gather(self, flat: Tensor, group: Group) -> Tensor:
        """The flat tensors of the group."""

    def swap(self, rows: Tensor, group: Group) -> Tensor:
        """Row ``i`` goes to rank ``i`` of the group."""

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Tensor:
        """The flat tensor of one rank."""


class Engine:
    """This rank's part of the cluster. Calls of the members of a group come in the same order.

    Args:
        rank: this rank.
        addresses: ``host:port`` of all ranks.
        timeout: seconds after which an operation that others do not come to fails.
        gpu: whether tensors are on the GPU, where NCCL carries them.
    """

    def __init__(self, *, rank: int, addresses: Sequence[str], timeout: float, gpu: bool) -> None:
        self.rank = rank
        self.addresses = tuple(addresses)
        self.timeout = timeout
        self.device = "GPU:0" if gpu else "CPU:0"
        self._hint = "nccl" if gpu else "auto"
        self._gpu = gpu
        self._keys: dict[tuple[Any, ...], int] = {}
        self._counts: dict[int, int] = {}
        self._order = threading.Lock()

    def reduce(self, flat: Tensor, merge: str, group: Group, *, divisor: int = 1) -> Tensor:
        """Elements combined over the group; ``merge`` is Add, Mul, Min or Max.

        Args:
            flat: one dimension; float16, bfloat16, float32, float64, int32 or int64.
            merge: how two elements are combined.
            group: who takes part.
            divisor: of the result; 1 for whole numbers.
        """
        if divisor != 1:
            return self.reduce(flat, merge, group) / tf.cast(divisor, flat.dtype)
        if group.size == 1:
            return flat
        length, step = int(flat.shape[0]), CHUNK // flat.dtype.size
        if length == 0:
            return flat
        if length <= step or self._gpu:
            return self._reduce(flat, merge, group)
        parts = [self._reduce(flat[at : at + step], merge, group) for at in range(0, length, step)]
        return tf.concat(parts, 0)

    def gather(self, flat: Tensor, group: Group) -> Tensor:
        """The flat tensors of the group, in the order of its ranks, of shape (size, length).

        Args:
            flat: of the same length on all ranks; float16, float32, float64, int32 or int64.
            group: who takes part.
        """
        if group.size == 1 or int(flat.shape[0]) == 0:
            return tf.reshape(tf.tile(flat, [group.size]), [group.size, -1 if int(flat.shape[0]) else 0])
        step = CHUNK // flat.dtype.size
        parts = []
        for at in range(0, int(flat.shape[0]), step):
            part = flat[at : at + step]
            found = tf.raw_ops.CollectiveGatherV2(
                input=part, ordering_token=[], **self._common(group, "gather", part)
            )
            parts.append(tf.reshape(found, [group.size, -1]))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 1)

    def swap(self, rows: Tensor, group: Group) -> Tensor:
        """Row ``i`` goes to rank ``i`` of the group; those that came from each, of the same shape.

        Args:
            rows: of shape (size, length), the same on all ranks; dtypes as for :meth:`gather`.
            group: who takes part.
        """
        if group.size == 1 or int(rows.shape[1]) == 0:
            return rows
        step = max(1, CHUNK // (rows.dtype.size * group.size))
        parts = []
        for at in range(0, int(rows.shape[1]), step):
            part = rows[:, at : at + step]
            parts.append(
                tf.raw_ops.CollectiveAllToAllV2(
                    input=part, ordering_token=[], **self._common(group, "swap", part)
                )
            )
        return parts[0] if len(parts) == 1 else tf.concat(parts, 1)

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Tensor:
        """The flat tensor of the rank whose place in the group is ``root``; dtypes as for :meth:`gather`."""
        if group.size == 1 or int(flat.shape[0]) == 0:
            return flat
        step = CHUNK // flat.dtype.size
        parts = []
        for at in range(0, int(flat.shape[0]), step):
            part = flat[at : at + step]
            common = self._common(group, f"broadcast {root}", part)
            if group.place == root:
                parts.append(tf.raw_ops.CollectiveBcastSendV2(input=part, **common))
            else:
                parts.append(tf.raw_ops.CollectiveBcastRecvV2(shape=part.shape, T=part.dtype, **common))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One operation of several threads at a time, on this rank's device."""
        with self._order, tf.device(self.device):
            yield

    def abort(self, reason: str) -> None:
        """End what waits, in any thread; nothing can be exchanged any more."""
        if len(self.addresses) > 1:
            tf_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)

    def _reduce(self, flat: Tensor, merge: str, group: Group) -> Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=flat,
            ordering_token=[],
            merge_op=merge,
            final_op="Id",
            **self._common(group, f"reduce {merge}", flat),
        )

    def _common(self, group: Group, what: str, flat: Tensor) -> dict[str, Any]:
        key = (group.number, what, flat.dtype, tuple(flat.shape))
        instance = self._keys.get(key)
        if instance is None:
            instance = self._counts[group.number] = self._counts.get(group.number, 0) + 1
            self._keys[key] = instance
        return {
            "group_size": group.size,
            "group_key": 2 * group.number + 1 + self._gpu,  # one key must not mix CPUs and GPUs
            "instance_key": instance,
            "communication_hint": self._hint,
            "timeout_seconds": self.timeout,
        }


_started: Engine | None = None


def start(
    *,
    rank: int,
    size: int,
    timeout: float,
    gpu: bool,
    one_host: bool,
    meet: Callable[[str], list[str]],
) -> Engine:
    """Join the cluster. It lives as long as the process: a later call in the same world finds it again.

    Args:
        rank: this rank.
        size: number of ranks.
        timeout: seconds that an operation waits for the others.
        gpu: whether tensors are on the GPU.
        one_host: whether all ranks are on this host.
        meet: given this rank's address, returns those of all ranks.

    Raises:
        WorldError: this process was in a cluster of other ranks before.
    """
    global _started
    if size == 1:
        return Engine(rank=0, addresses=("",), timeout=timeout, gpu=gpu)
    if _started is not None:
        addresses = meet(_started.addresses[_started.rank])
        if (rank, *addresses) != (_started.rank, *_started.addresses):
            raise WorldError(
                "TensorFlow's runtime can join one set of ranks in the life of a process, and this one has "
                f"been in another: rank {_started.rank} of {len(_started.addresses)}.",
                fix="Start the workers anew when their number changes (hora run does so).",
            )
        again = Engine(rank=rank, addresses=addresses, timeout=timeout, gpu=gpu)
        again._keys, again._counts = _started._keys, _started._counts
        _started = again
        return again
    addresses = meet(free_address(one_host=one_host))
    _enable(rank, addresses)
    _started = Engine(rank=rank, addresses=addresses, timeout=timeout, gpu=gpu)
    return _started


def is_broken(error: BaseException) -> bool:
    """Whether an error is the engine's own, after which it carries nothing any more."""
    return isinstance(error, tf.errors.OpError)


def _enable(rank: int, addresses: Sequence[str]) -> None:
    """Make this process a task of the cluster, which gives its devices other names."""
    runtime = tf_context.context()
    leader = f"/job:{JOB}/replica:0/task:0"
    filters = (f"/job:{JOB}/task:{rank}",)
    if runtime._context_handle is None:
        runtime.configure_collective_ops(
            collective_leader=leader, scoped_allocator_enabled_ops=(), device_filters=filters
        )
    else:  # too late for the function above, and in time for what it does
        warnings.warn(
            "TensorFlow has computed something before hora.tensorflow.init(). Variables and tensors of that "
            "time cannot be used any more: call init() first.",
            stacklevel=7,
        )
        runtime._collective_leader = leader
        runtime._collective_scoped_allocator_enabled_ops = ()
        runtime._collective_device_filters = filters
    cluster = tf.train.ClusterSpec({JOB: list(addresses)})
    server = tf.train.ServerDef(
        cluster=cluster.as_cluster_def(),
        job_name=JOB,
        task_index=rank,
        protocol="grpc",
        default_session_config=runtime.config,
    )
    logger = logging.getLogger("absl")  # it warns, too, in other words
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        runtime.enable_collective_ops(server)
        runtime.ensure_initialized()
    finally:
        logger.setLevel(level)
