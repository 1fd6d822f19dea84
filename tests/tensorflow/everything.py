"""Run by every rank of a job: all operations and dtypes against NumPy's float64, then two trainings.

Rank 0 leaves the trained variables in the file that is given.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hora.tensorflow as hora
from hora.core.errors import UsageError
from hora.tensorflow import _shared

INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.uint32, tf.uint64)
FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
COMPLEX = (tf.complex64, tf.complex128)
ROUNDING = {tf.float16: 2e-3, tf.bfloat16: 2e-2, tf.float32: 1e-6, tf.complex64: 1e-6}

if os.environ.get("HORA_ENGINE") != "gloo":  # TensorFlow's own runtime gives the devices other names
    early = tf.Variable([2.0, 3.0])
hora.init()
rank, size = hora.rank(), hora.size()


class Cases:
    """Calls and what they give: made one by one eagerly, and all together in one graph."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._given: list[Any] = []
        self._checks: list[Any] = []

    def add(self, function: Any, given: Any, *wanted: Any) -> None:
        """``wanted``: pairs of value and dtype, one for each result."""
        self._calls.append(function)
        self._given.append(given)
        self._checks.append(wanted)

    def check(self) -> None:
        graph = tf.function(
            lambda given: [call(one) for call, one in zip(self._calls, given, strict=True)],
            autograph=False,
        )
        for found in (
            [call(one) for call, one in zip(self._calls, self._given, strict=True)],
            graph(self._given),
        ):
            for result, wanted in zip(found, self._checks, strict=True):
                for one, (value, dtype) in zip(tf.nest.flatten(result), wanted, strict=True):
                    close(one, value, dtype)


def close(found: Any, wanted: Any, dtype: tf.DType) -> None:
    assert found.dtype is dtype, (found.dtype, dtype)
    exact = np.asarray(wanted)
    assert tuple(found.shape) == exact.shape, (found.shape, exact.shape)
    wide = found.numpy().astype(exact.dtype)
    assert np.allclose(wide, exact, rtol=ROUNDING.get(dtype, 1e-12), atol=0), (dtype, wide, exact)


def of_rank(number: int, dtype: tf.DType, shape: tuple[int, ...] = (5, 3)) -> Any:
    """Small whole numbers, other ones on each rank; as float64, complex128 or bool."""
    values = np.random.default_rng(number).integers(1, 5, shape).astype(np.float64)
    if dtype is tf.bool:
        return values > 2
    return values + 1j * values[::-1] if dtype.is_complex else values


def tensor(dtype: tf.DType, shape: tuple[int, ...] = (5, 3)) -> Any:
    return tf.cast(tf.constant(of_rank(rank, dtype, shape)), dtype)


def all_of(dtype: tf.DType, shape: tuple[int, ...] = (5, 3)) -> Any:
    return np.stack([of_rank(number, dtype, shape) for number in range(size)])


def mine_of(rows: Any) -> Any:
    """This rank's rows of a reducescatter."""
    share, extra = divmod(len(rows), size)
    first = rank * share + min(rank, extra)
    return rows[first : first + share + (rank < extra)]


def reductions(cases: Cases) -> None:
    folds = {hora.Sum: np.sum, hora.Min: np.min, hora.Max: np.max, hora.Product: np.prod}
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX):
        everyone, given = all_of(dtype), tensor(dtype)
        for op, fold in folds.items():
            if dtype.is_complex and op in (hora.Min, hora.Max):
                continue
            wanted = fold(everyone, axis=0)
            cases.add(lambda x, op=op: hora.allreduce(x, op=op), given, (wanted, dtype))
            cases.add(lambda x, op=op: hora.reducescatter(x, op=op), given, (mine_of(wanted), dtype))
        if dtype not in INTEGERS:
            cases.add(hora.allreduce, given, (everyone.mean(0), dtype))
            cases.add(hora.reducescatter, given, (mine_of(everyone.mean(0)), dtype))
            cases.add(
                lambda x: hora.allreduce(x, op=hora.Sum, prescale_factor=0.5, postscale_factor=3.0),
                given,
                (1.5 * everyone.sum(0), dtype),
            )
    truth = all_of(tf.bool)
    cases.add(lambda x: hora.allreduce(x, op=hora.Max), tensor(tf.bool), (truth.any(0), tf.bool))
    cases.add(lambda x: hora.allreduce(x, op=hora.Min), tensor(tf.bool), (truth.all(0), tf.bool))
    for shape in ((), (0, 2), (1,), (1_100_001,)):  # the last is more than one piece
        total = all_of(tf.float32, shape).sum(0)
        cases.add(lambda x: hora.allreduce(x, op=hora.Sum), tensor(tf.float32, shape), (total, tf.float32))
    big = tf.constant([2**63 + rank, 1], tf.uint64)
    assert hora.allreduce(big, op=hora.Max).numpy().tolist() == [2**63 + size - 1, 1]
    half = hora.allreduce(tensor(tf.float32), op=hora.Sum, compression=hora.Compression.fp16)
    close(half, all_of(tf.float32).sum(0), tf.float32)
    if size == 2:
        pair = [np.array([1.0, 0.0]), np.array([1.0, 1.0])]  # 1 - 1/2 and 1 - 1/4 of them
        wanted = 0.5 * pair[0] + 0.75 * pair[1]
        cases.add(lambda x: hora.allreduce(x, op=hora.Adasum), tf.constant(pair[rank]), (wanted, tf.float64))


def groups(cases: Cases) -> None:
    dtypes = (tf.float32, tf.float64, tf.float32, tf.int32)
    given = [tensor(dtype) for dtype in dtypes]
    sums = [(all_of(dtype).sum(0), dtype) for dtype in dtypes]
    cases.add(lambda several: hora.grouped_allreduce(several, op=hora.Sum), given, *sums)
    whole = [(np.concatenate(all_of(dtype)), dtype) for dtype in dtypes]
    cases.add(hora.grouped_allgather, given, *whole)
    parts = [(mine_of(value), dtype) for value, dtype in sums]
    cases.add(lambda several: hora.grouped_reducescatter(several, op=hora.Sum), given, *parts)


def exchanges(cases: Cases) -> None:
    rows = [(2, 0, 5)[number % 3] for number in range(size)]
    # Rank i sends j + (i == j) rows to rank j.
    sent = [[j + (i == j) for j in range(size)] for i in range(size)]
    received = [sent[i][rank] for i in range(size)]
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX, tf.bool):
        whole = np.concatenate([of_rank(number, dtype)[: rows[number]] for number in range(size)])
        cases.add(hora.allgather, tensor(dtype)[: rows[rank]], (whole, dtype))
        last = of_rank(size - 1, dtype)
        cases.add(lambda x: hora.broadcast(x, size - 1), tensor(dtype), (last, dtype))
        parts = []
        for i in range(size):
            start = sum(sent[i][:rank])
            parts.append(of_rank(i, dtype, (sum(sent[i]), 2))[start : start + sent[i][rank]])
        cases.add(
            lambda x: hora.alltoall(x, sent[rank]),
            tensor(dtype, (sum(sent[rank]), 2)),
            (np.concatenate(parts), dtype),
            (received, tf.int32),
        )
    shape = (2 * size, 2)
    pieces = [of_rank(i, tf.float32, shape)[2 * rank : 2 * rank + 2] for i in range(size)]
    cases.add(hora.alltoall, tensor(tf.float32, shape), (np.concatenate(pieces), tf.float32))
    cases.add(hora.allgather, tf.constant(float(rank)), (np.arange(float(size)), tf.float32))
    cases.add(lambda _: [hora.rank_op(), hora.size_op()], rows, (rank, tf.int32), (size, tf.int32))
    slices = tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.range(rank + 1), tf.constant([4, 2]))
    total = np.zeros((4, 2))
    for number in range(size):
        total[: number + 1] += 1
    cases.add(
        lambda given: tf.convert_to_tensor(hora.allreduce(given, op=hora.Sum)), slices, (total, tf.float32)
    )


def objects() -> None:
    hora.barrier()
    tf.function(hora.barrier)()
    assert hora.allgather_object({"rank": rank}) == [{"rank": number} for number in range(size)]
    assert hora.broadcast_object(f"of {rank}", size - 1) == f"of {size - 1}"
    weighted = sum(n * (n + 1) for n in range(size)) / sum(range(1, size + 1))
    assert hora.mean(float(rank), weight=rank + 1) == weighted


def gradients(cases: Cases) -> None:
    """Each is the transpose of its operation, as if the ranks' losses were added up."""
    weights = all_of(tf.float64)  # of the results, other ones on each rank
    variable = tf.Variable(tensor(tf.float64))
    rows, stacked = tf.constant(weights[rank]), tf.constant(np.concatenate(weights))

    def add(function: Any, weight: Any, wanted: Any) -> None:
        def gradient(weighs: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(variable) * weighs)
            return tape.gradient(loss, variable)

        cases.add(gradient, weight, (wanted, tf.float64))

    add(lambda x: hora.allreduce(x, op=hora.Sum), rows, weights.sum(0))
    add(hora.allreduce, rows, weights.mean(0))
    # All weigh alike there, so that each row counts size times.
    add(hora.allgather, stacked, size * weights[rank])
    add(lambda x: hora.broadcast(x, 0), rows, weights.sum(0) if rank == 0 else 0 * weights[0])
    add(lambda x: hora.alltoall(tf.tile(x, [size, 1])), stacked, size * weights[rank])
    add(lambda x: hora.reducescatter(tf.tile(x, [size, 1]), op=hora.Sum), rows, weights.sum(0))
    everyone = all_of(tf.float64)
    held = everyone == everyone.max(0)
    add(lambda x: hora.allreduce(x, op=hora.Max), rows, weights.sum(0) * held[rank] / held.sum(0))


def sets_of_ranks() -> None:
    if size < 3:
        return
    pair = hora.add_process_set([0, 2])
    if pair.included():
        found = hora.allreduce(tf.constant([float(rank)]), op=hora.Sum, process_set=pair)
        assert found.numpy().tolist() == [2.0]
        assert hora.allgather(tf.constant([rank]), process_set=pair).numpy().tolist() == [0, 2]
        assert hora.broadcast(tf.constant(rank), 2, process_set=pair).numpy() == 2
    assert int(hora.process_set_included_op(pair.process_set_id)) == pair.included()
    assert hora.remove_process_set(pair)


def refusals() -> None:
    """What a rank can see by itself is told by it alone."""
    wrong = (
        lambda: hora.allreduce(tf.constant(["text"])),
        lambda: hora.allreduce(tf.constant([1])),  # an average of integers
        lambda: hora.allreduce(tf.constant([1.0]), average=True, op=hora.Sum),
        lambda: hora.broadcast(tf.constant([1.0]), size),
        lambda: hora.alltoall(tf.ones([2]), splits=[5] * size),
        lambda: hora.reducescatter(tf.constant(1.0)),
        lambda: hora.allreduce(tf.constant([1 + 1j]), op=hora.Max),
        lambda: hora.DistributedGradientTape(tf.GradientTape(), op=hora.Max),
        lambda: hora.DistributedOptimizer(object()),
    )
    for call in wrong:
        with pytest.raises(UsageError):
            call()


def data() -> None:
    numbers = np.arange(23)
    for tail in ("drop", "pad", "uneven"):
        loader = hora.data_loader({"x": numbers}, global_batch=6, seed=5, tail=tail)
        seen = [[batch["x"].numpy().tolist() for batch in loader] for _ in range(2)]
        told = hora.allgather_object(seen)
        for epoch in range(2):
            whole = [
                number
                for step in zip(*(one[epoch] for one in told), strict=True)
                for part in step
                for number in part
            ]
            order = hora_order(23, epoch)
            assert whole == {"drop": order[:18], "pad": order + order[:1], "uneven": order}[tail], (
                tail,
                whole,
            )
    sharded = hora.shard(tf.data.Dataset.range(14), global_batch=6)
    told = hora.allgather_object([batch.numpy().tolist() for batch in sharded])
    assert [number for step in zip(*told, strict=True) for part in step for number in part] == list(range(12))
    passed = hora.data_loader((numbers,), global_batch=6, seed=5).dataset()
    assert passed.cardinality().numpy() == 3
    assert sum(1 for _ in passed) == 3


def hora_order(count: int, epoch: int) -> list[int]:
    from hora.adapter.order import epoch_order

    return epoch_order(count, seed=5, epoch=epoch, shuffle=True).tolist()


def train(make: Any, floats: str, *, compiled: bool) -> list[Any]:
    """A small CNN with batch norm, from the same start; 12 steps; its variables."""
    tf.keras.config.set_floatx(floats)
    tf.keras.config.set_dtype_policy(floats)
    tf.keras.utils.set_random_seed(rank)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Conv2D(4, 3, activation="tanh"),
            hora.SyncBatchNormalization(),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )
    if rank == 0:
        source = np.random.default_rng(7)
        for variable in model.trainable_variables:
            variable.assign((0.3 * source.normal(size=variable.shape)).astype(np.float32))
    optimizer = make()
    optimizer.build(model.trainable_variables)
    hora.broadcast_variables(model.variables, 0)
    hora.broadcast_variables(optimizer.variables, 0)
    source = np.random.default_rng(3)
    images = source.normal(size=(48, 6, 6, 1)).astype(np.float32).astype(floats)
    labels = source.integers(0, 5, 48)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with hora.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if compiled else step
    loader = hora.data_loader((images, labels), global_batch=12, seed=1)
    for _ in range(3):
        for x, y in loader:
            run(x, y)
    values = [
        np.asarray(tf.convert_to_tensor(variable)) for variable in (*model.variables, *optimizer.variables)
    ]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    assert len(set(hora.allgather_object(digest))) == 1, "the replicas differ"
    trained = [np.asarray(tf.convert_to_tensor(variable)) for variable in model.variables]
    assert {value.dtype.name for value in trained} == {floats}
    return trained


def optimizers() -> None:
    """Two passes are added up, or averaged, before the ranks' mean is used."""
    for average, local in itertools.product((False, True), (False, True)):
        variable = tf.Variable([1.0, 1.0])
        optimizer = hora.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        if local:
            optimizer.register_local_var(variable)
        for passes in range(2):
            optimizer.apply_gradients([(tf.constant([1.0, 2.0 * passes]) * (rank + 1), variable)])
        mean = (rank + 1) / size if local else (size + 1) / 2
        wanted = 1.0 - mean * np.array([2.0, 2.0]) / (2 if average else 1)
        assert np.allclose(variable, wanted), (variable, wanted)


if os.environ.get("HORA_ENGINE") != "gloo":
    early.assign_add([1.0, 1.0])
    assert early.numpy().tolist() == [3.0, 4.0]
cases = Cases()
for fill in (reductions, groups, exchanges, gradients):
    fill(cases)
cases.check()
if size == 3:
    _shared.DIRECT = 2  # share the work as more ranks do
    for shape in ((2,), (5, 3), (1_100_001,)):
        mean, most = (
            hora.allreduce(tensor(tf.float64, shape)),
            hora.allreduce(tensor(tf.int32, shape), op=hora.Max),
        )
        close(mean, all_of(tf.float64, shape).mean(0), tf.float64)
        close(most, all_of(tf.int32, shape).max(0), tf.int32)
for check in (objects, sets_of_ranks, refusals, data, optimizers):
    check()
kept = {
    f"{floats} {name} {number}": value
    for floats in ("float64", "float32")
    for name, make in (
        ("sgd", lambda: tf.keras.optimizers.SGD(0.05)),
        ("momentum", lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9)),
        ("adam", lambda: tf.keras.optimizers.Adam(0.003)),
    )
    for number, value in enumerate(train(make, floats, compiled=name != "sgd"))
}
if rank == 0:
    np.savez(sys.argv[1], **kept)
hora.shutdown()
hora.init()  # the same world again
assert hora.allreduce(tf.constant([1.0]), op=hora.Sum).numpy().tolist() == [float(size)]
