"""Run by every rank under ``hora run --horovod``: what Horovod's interface for TensorFlow promises."""

from __future__ import annotations

import sys
import threading
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

hvd.init(process_sets="dynamic")
rank, size = hvd.rank(), hvd.size()
MISMATCH = tf.errors.FailedPreconditionError
INVALID = tf.errors.InvalidArgumentError


def results() -> None:
    x = tf.range(10, dtype=tf.float32)
    assert np.allclose(hvd.allreduce(x * (rank + 1), op=hvd.Sum), np.arange(10) * sum(range(1, size + 1)))
    with pytest.warns(DeprecationWarning, match="write op=hvd.Sum"):
        assert np.allclose(hvd.allreduce(x, average=False), np.arange(10) * size)
    for dtype in (tf.int32, tf.int64, tf.uint8, tf.int8):
        assert hvd.allreduce(tf.ones([3], dtype) * 5).numpy().tolist() == [5, 5, 5]
    scaled = hvd.allreduce(tf.constant([10, 20]), op=hvd.Sum, prescale_factor=0.25)
    assert scaled.numpy().tolist() == [2 * size, 5 * size]  # towards zero
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([rank, rank + 1]), tf.constant([10, 3]))
    found = hvd.allreduce(slices)
    assert np.allclose(found.values, 1 / size)
    assert found.indices.numpy().tolist() == [number + more for number in range(size) for more in (0, 1)]
    assert hvd.allgather_object({"r": rank}) == [{"r": number} for number in range(size)]
    assert hvd.broadcast_object([rank], 0) == [0]
    variable = tf.Variable([float(rank)])
    hvd.broadcast_variables([variable], root_rank=size - 1)
    assert variable.numpy() == size - 1

    @tf.function
    def graph(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum), hvd.rank_op(), hvd.size_op(), hvd.local_rank_op()

    total, *places = graph(x)
    assert np.allclose(total, x * size)
    assert [int(place) for place in places] == [rank, size, rank]


def mismatches() -> None:
    """Told on every rank, after which all goes on."""
    for call in (
        lambda: hvd.allreduce(tf.ones([17 + rank] * 2)),
        lambda: hvd.allreduce(tf.ones([4], tf.float32 if rank % 2 else tf.int32)),
        lambda: hvd.allgather(tf.ones([2] * (rank + 1))),
        lambda: hvd.broadcast(tf.ones([3]), rank),
        lambda: hvd.broadcast(tf.ones([3 + rank]), 0),
        lambda: hvd.alltoall(tf.ones([size] * (rank + 1))),
        lambda: hvd.reducescatter(tf.ones([4 + rank])),
        lambda: hvd.grouped_allreduce([tf.ones([4]), tf.ones([3 + rank])]),
        lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum if rank else hvd.Min),
    ):
        with pytest.raises(MISMATCH):
            call()
    for call in (
        lambda: hvd.alltoall(tf.ones([4]), splits=[1] * (size + 1)),
        lambda: hvd.alltoall(tf.ones([4]), splits=[5] * size),
        lambda: hvd.alltoall(tf.ones([size + 1])),
        lambda: hvd.reducescatter(tf.constant(1.0)),
    ):
        with pytest.raises(INVALID):
            call()
    with pytest.raises(ValueError, match="whole numbers"):
        hvd.alltoall(tf.ones([size]), splits=tf.ones([size]))
    with pytest.raises(tf.errors.OpError, match="Mismatched allreduce tensor shapes"):
        tf.function(hvd.allreduce)(tf.ones([2 + rank]))
    with pytest.raises(RuntimeError, match="does not support eager"):
        hvd.broadcast_global_variables(0)


def gradients() -> None:
    variable = tf.Variable(tf.ones([5, 5]))
    wide = np.ones((5 * size, 5))
    for call, weights, wanted in (
        (lambda: hvd.allreduce(variable, op=hvd.Sum), np.ones((5, 5)), size),
        (lambda: hvd.allreduce(variable, op=hvd.Average), np.ones((5, 5)), 1),
        (lambda: hvd.allgather(variable), wide, 1),
        (lambda: hvd.broadcast(variable, 0), np.ones((5, 5)), int(rank == 0)),
        (lambda: hvd.alltoall(tf.tile(variable, [size, 1])), wide, size),
        (lambda: hvd.reducescatter(tf.tile(variable, [size, 1]), op=hvd.Sum), np.ones((5, 5)), size * size),
    ):
        with tf.GradientTape() as tape:
            result = call()
        assert np.allclose(tape.gradient(result, variable, tf.constant(weights, tf.float32)), wanted)


def any_order() -> None:
    found = {}

    def ask(name: str) -> None:
        found[name] = hvd.allreduce(tf.ones([4]), op=hvd.Sum, name=name).numpy()

    names = [f"operation {number}" for number in range(5)]
    threads = [threading.Thread(target=ask, args=(name,)) for name in (names if rank else reversed(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.allclose(found[name], size) for name in names)


def some_ranks() -> None:
    few = hvd.add_process_set([0])
    if few.included():
        assert hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=few).numpy().tolist() == [1, 1]
    assert int(hvd.process_set_included_op(few.process_set_id)) == int(few.included())
    assert int(hvd.size_op(few.process_set_id)) == 1
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(few)
    assert few.process_set_id is None


def uneven() -> None:
    for number in range(3 + rank):
        found = hvd.allreduce(tf.ones([3]), op=hvd.Sum).numpy()
        assert np.allclose(found, sum(3 + other > number for other in range(size)))
    assert int(hvd.join()) == size - 1


def passes() -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for _ in range(4):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]) * (rank + 1), variable)])
    assert np.allclose(variable, np.array([1.0, 2.0]) - 4 * (size + 1) / 2)


def states() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
    state = hvd.elastic.TensorFlowKerasState(model, tf.keras.optimizers.SGD(0.1), batch=3)
    kept = [value.copy() for value in model.get_weights()]
    model.set_weights([value + 1 for value in kept])
    state.batch = 7
    state.restore()
    assert state.batch == 3
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), kept, strict=True))
    state.batch = 10 + rank
    state.commit()
    state.sync()
    assert state.batch == 10


for check in (results, mismatches, gradients, any_order, some_ranks, uneven, passes, states):
    check()
hvd.shutdown()
hvd.init()
assert hvd.allreduce(tf.ones([1])).numpy() == 1
assert "torch" not in sys.modules, "a script for TensorFlow imports torch"
