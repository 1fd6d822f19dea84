"""Operations of Horovod's interface for TensorFlow, run by every rank of jobs of 1, 2 and 3 workers.

Values are small whole numbers, of which every dtype holds every result; what they are to be is computed with
NumPy in float64.
"""

import json
import os
import threading
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hora.tensorflow import _adasum
from hora.tensorflow._engine import Group

INTEGERS = (tf.uint8, tf.int8, tf.int32, tf.int64)
FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
OTHERS = (tf.uint16, tf.int16, tf.bool)
SHAPES = ((), (17,), (5, 4), (3, 1, 2), (0, 3))
WORKERS = int(os.environ["HOROVOD_SIZE"])
MISMATCH = tf.errors.FailedPreconditionError


@pytest.fixture(autouse=True, scope="module")
def job():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def both(function):
    """A function as it is, and in a graph."""
    return function, tf.function(function)


def whole(shape, rank):
    return ((np.arange(int(np.prod(shape))) % 5) + rank).reshape(shape).astype(np.float64)


def mine(shape, dtype):
    return tf.cast(tf.constant(whole(shape, hvd.rank())), dtype)


def everyone(shape):
    return [whole(shape, rank) for rank in range(hvd.size())]


def same(result, wanted, dtype):
    assert result.dtype == dtype
    assert tuple(result.shape) == np.shape(wanted)
    assert np.array_equal(tf.cast(result, tf.float64), wanted)


def test_rank_and_size_are_those_of_the_launcher():
    for name in ("rank", "size", "local_rank", "local_size"):
        assert getattr(hvd, name)() == int(os.environ[f"HOROVOD_{name.upper()}"])
        assert int(getattr(hvd, f"{name}_op")()) == getattr(hvd, name)()
        assert int(tf.function(getattr(hvd, f"{name}_op"))()) == getattr(hvd, name)()
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()


@pytest.mark.parametrize("graph", [False, True])
def test_allreduce(graph):
    """Each operation, dtype and shape; in a graph all of them in one."""
    dtypes, ops = INTEGERS + FLOATS, (hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
    fold = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    cases = [
        (dtype, shape, op)
        for dtype in dtypes
        for shape in SHAPES
        for op in ops
        if shape == (17,) or (op is hvd.Sum and dtype in {tf.uint8, tf.int64, tf.bfloat16, tf.float32})
    ]
    tensors = [mine(shape, dtype) for dtype, shape, _ in cases]

    def reduce(*tensors):
        return [hvd.allreduce(tensor, op=op) for tensor, (_, _, op) in zip(tensors, cases, strict=True)]

    results = tf.function(reduce)(*tensors) if graph else reduce(*tensors)
    for result, (dtype, shape, op) in zip(results, cases, strict=True):
        same(result, fold[op](everyone(shape), axis=0), dtype)


@pytest.mark.parametrize("graph", [False, True])
def test_average(graph):
    def reduce(*tensors):
        return [hvd.allreduce(tensor) for tensor in tensors]

    tensors = [mine((5, 4), dtype) for dtype in FLOATS + INTEGERS]
    mean = np.sum(everyone((5, 4)), axis=0) / hvd.size()
    results = tf.function(reduce)(*tensors) if graph else reduce(*tensors)
    for result, dtype in zip(results, FLOATS + INTEGERS, strict=True):
        same(result, np.trunc(mean) if dtype.is_integer else mean.astype(dtype.as_numpy_dtype), dtype)


def test_average_argument_is_deprecated_and_excludes_op():
    for form in (hvd.allreduce, lambda *args, **named: hvd.grouped_allreduce([*args], **named)[0]):
        with pytest.warns(DeprecationWarning, match=r"write op=hvd\.Sum") as told:
            total = form(tf.ones([2]), average=False)
        assert total.numpy().tolist() == [hvd.size()] * 2
        assert told[0].filename == __file__
        with pytest.raises(ValueError):
            form(tf.ones([2]), average=True, op=hvd.Sum)


def test_variables_arrays_and_numbers_are_reduced_too():
    for value in (tf.Variable([1.0, 2.0]), np.array([1.0, 2.0], np.float32), [1.0, 2.0]):
        assert hvd.allreduce(value, op=hvd.Sum).numpy().tolist() == [hvd.size(), 2 * hvd.size()]
    assert float(hvd.allreduce(1.5, op=hvd.Sum)) == 1.5 * hvd.size()


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float16, tf.float32, tf.float64])
def test_scale_factors(dtype):
    tensor = tf.cast(tf.constant([1, 2, 3, 50]), dtype)
    exact = np.array([1.0, 2.0, 3.0, 50.0])
    for form in (
        hvd.allreduce,
        lambda tensor, **named: hvd.grouped_allreduce([tensor, tensor], **named)[1],
        lambda tensor, **named: hvd.allgather(hvd.reducescatter(tensor, **named)),
    ):
        before = form(tensor, op=hvd.Sum, prescale_factor=0.7)
        after = form(tensor, op=hvd.Sum, postscale_factor=0.7)
        if dtype.is_integer:
            assert np.array_equal(before, np.trunc(exact * 0.7) * hvd.size())
            assert np.array_equal(after, np.trunc(exact * hvd.size() * 0.7))
        else:
            close = {tf.float16: 2e-3, tf.float32: 1e-6, tf.float64: 1e-15}[dtype]
            assert np.allclose(before, exact * 0.7 * hvd.size(), rtol=close, atol=0)
            assert np.allclose(after, exact * 0.7 * hvd.size(), rtol=close, atol=0)


def test_compression():
    for compression, dtype in ((hvd.Compression.fp16, tf.float16), (hvd.Compression.none, None)):
        for given in (tf.float32, tf.float64, tf.int32):
            tensor = mine((9,), given)
            small, context = compression.compress(tensor)
            assert small.dtype == (dtype if dtype and given.is_floating else given)
            assert compression.decompress(small, context).dtype == given
            same(hvd.allreduce(tensor, op=hvd.Sum, compression=compression), sum(everyone((9,))), given)
            parts = hvd.grouped_allreduce([tensor, tensor], op=hvd.Sum, compression=compression)
            same(parts[1], sum(everyone((9,))), given)
            rows = hvd.reducescatter(tensor, op=hvd.Sum, compression=compression)
            same(hvd.allgather(rows), sum(everyone((9,))), given)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_indexed_slices(op):
    """A row of each rank and one that all have; the number of rows differs."""
    rank, size = hvd.rank(), hvd.size()

    def reduce():
        slices = tf.IndexedSlices(
            tf.ones([rank + 1, 3]) * (rank + 1), tf.range(rank + 1), tf.constant([size, 3])
        )
        found = hvd.allreduce(slices, op=op, device_sparse="/cpu:0")
        return found.values, found.indices, tf.convert_to_tensor(found)

    wanted = np.zeros((size, 3))
    for other in range(size):
        wanted[: other + 1] += other + 1
    for form in both(reduce):
        values, indices, dense = form()
        assert values.shape[0] == indices.shape[0] == size * (size + 1) // 2
        assert np.allclose(dense, wanted / (size if op is hvd.Average else 1))
    with pytest.raises((NotImplementedError, ValueError)):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0])), op=hvd.Max)


@pytest.mark.parametrize("graph", [False, True])
def test_grouped_operations(graph):
    rank, size = hvd.rank(), hvd.size()
    dtypes = (tf.float32, tf.int32, tf.float64, tf.float16)

    def all_of_them(*tensors):
        return (
            hvd.grouped_allreduce(list(tensors), op=hvd.Sum),
            hvd.grouped_allgather([tensor[: rank + 1] for tensor in tensors]),
            hvd.grouped_reducescatter(list(tensors), op=hvd.Sum),
        )

    tensors = [mine((7, 2), dtype) for dtype in dtypes]
    reduced, gathered, scattered = (tf.function(all_of_them) if graph else all_of_them)(*tensors)
    total = sum(everyone((7, 2)))
    rows = np.array_split(total, size)[rank]
    for place, dtype in enumerate(dtypes):
        same(reduced[place], total, dtype)
        same(gathered[place], np.concatenate([whole((7, 2), k)[: k + 1] for k in range(size)]), dtype)
        same(scattered[place], rows, dtype)
    assert hvd.grouped_allreduce([]) == []


@pytest.mark.parametrize("graph", [False, True])
def test_allgather_broadcast_and_alltoall_of_every_dtype(graph):
    rank, size = hvd.rank(), hvd.size()
    dtypes = INTEGERS + FLOATS + OTHERS

    def all_of_them(*tensors):
        rows = [2 * k + rank % 2 for k in range(size)]
        return [
            (
                hvd.allgather(tensor[: 2 * rank]),
                hvd.broadcast(tensor, size - 1),
                hvd.alltoall(tensor[: 2 * size]),
                *hvd.alltoall(tensor[: sum(rows)], splits=rows),
            )
            for tensor in tensors
        ]

    length = size * (size - 1) + 2 * size
    tensors = [mine((length, 2), dtype) for dtype in dtypes]
    found = (tf.function(all_of_them) if graph else all_of_them)(*tensors)
    for (gathered, sent, even, uneven, received), dtype in zip(found, dtypes, strict=True):
        parts = [
            part.astype(bool).astype(float) if dtype == tf.bool else part for part in everyone((length, 2))
        ]
        same(gathered, np.concatenate([part[: 2 * k] for k, part in enumerate(parts)]), dtype)
        same(sent, parts[-1], dtype)
        same(even, np.concatenate([part[2 * rank : 2 * rank + 2] for part in parts]), dtype)
        counts = [2 * rank + k % 2 for k in range(size)]
        starts = [rank * (rank - 1) + rank * (k % 2) for k in range(size)]
        wanted = [part[at : at + n] for part, at, n in zip(parts, starts, counts, strict=True)]
        same(uneven, np.concatenate(wanted), dtype)
        assert received.numpy().tolist() == counts


def test_reducescatter_of_every_dtype():
    """Seven rows: the first ranks get one more."""
    for form in both(lambda tensor, op: hvd.reducescatter(tensor, op=op)):
        for dtype in INTEGERS + FLOATS if form.__name__ == "<lambda>" else (tf.float32,):
            rows = np.array_split(sum(everyone((7, 2))), hvd.size())[hvd.rank()]
            same(form(mine((7, 2), dtype), hvd.Sum), rows, dtype)
            if dtype.is_floating:
                same(
                    form(mine((7, 2), dtype), hvd.Average),
                    (rows / hvd.size()).astype(dtype.as_numpy_dtype),
                    dtype,
                )
    few = hvd.reducescatter(tf.ones([1, 3]), op=hvd.Sum)
    assert few.shape == ((1 if hvd.rank() == 0 else 0), 3)


def test_shapes_that_a_graph_learns_when_it_runs():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def graph(x):
        assert hvd.allreduce(x).shape.as_list() == [None, 2]
        assert hvd.allgather(x).shape.as_list() == [None, 2]
        return (
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather(x),
            hvd.broadcast(x, 0),
            hvd.reducescatter(x, op=hvd.Sum),
        )

    for rows in (1, 4):
        x = mine((rows, 2), tf.float32)
        reduced, gathered, sent, part = graph(x)
        parts = everyone((rows, 2))
        same(reduced, sum(parts), tf.float32)
        same(gathered, np.concatenate(parts), tf.float32)
        same(sent, parts[0], tf.float32)
        same(part, np.array_split(sum(parts), hvd.size())[hvd.rank()], tf.float32)


def test_loops_and_conditions_of_a_graph():
    @tf.function
    def graph(x):
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Sum)
        return hvd.allreduce(x, op=hvd.Max) if tf.reduce_sum(x) > 0 else x

    assert np.allclose(graph(tf.ones([2])), hvd.size() ** 3)


def test_broadcast_changes_variables_in_place():
    rank, size = hvd.rank(), hvd.size()
    for dtype in (tf.float32, tf.float64, tf.float16, tf.int32, tf.int64, tf.bool, tf.uint8):
        variables = [tf.Variable(tf.cast(whole((3,), rank), dtype)) for _ in range(2)]
        results = hvd.broadcast_(variables, root_rank=size - 1)
        wanted = whole((3,), size - 1)
        wanted = wanted.astype(bool).astype(float) if dtype == tf.bool else wanted
        for variable, result in zip(variables, results, strict=True):
            same(tf.convert_to_tensor(variable), wanted, dtype)
            same(tf.convert_to_tensor(result), wanted, dtype)
    variables = [tf.Variable(float(rank)), tf.Variable([rank])]
    tf.function(lambda: hvd.broadcast_(variables, 0))()
    assert [variable.numpy().tolist() for variable in variables] == [0.0, [0]]
    for inplace in (False, True):
        variable = tf.Variable([float(rank)] * 3)
        hvd.broadcast_variables([variable], root_rank=size - 1, inplace=inplace)
        assert variable.numpy().tolist() == [float(size - 1)] * 3


def test_objects():
    rank, size = hvd.rank(), hvd.size()
    mine = {"rank": rank, "array": np.arange(rank + 1), "text": "x" * (1000 * rank)}
    found = hvd.broadcast_object(mine, root_rank=size - 1)
    assert (found["rank"], len(found["text"]), found["array"].tolist()) == (
        size - 1,
        1000 * (size - 1),
        [*range(size)],
    )
    assert hvd.broadcast_object_fn(root_rank=0)([rank]) == [0]
    assert hvd.broadcast_object_fn(root_rank=0, name="again")(obj=[rank]) == [0]
    assert [each["rank"] for each in hvd.allgather_object(mine)] == [*range(size)]
    assert hvd.allgather_object(None, name="nothing") == [None] * size


def test_many_names_in_any_order():
    names = [f"operation/{number}" for number in range(12)]
    found = {}

    def ask(name):
        found[name] = hvd.allreduce(tf.ones([4]) * len(name), op=hvd.Sum, name=name).numpy()

    threads = [
        threading.Thread(target=ask, args=(name,)) for name in (names if hvd.rank() % 2 else reversed(names))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: total[0] for name, total in found.items()} == {
        name: len(name) * hvd.size() for name in names
    }


@pytest.mark.skipif(WORKERS == 1, reason="one rank agrees with itself")
def test_what_does_not_match_is_an_error_on_all_ranks():
    rank, size = hvd.rank(), hvd.size()
    odd = rank % 2
    calls = [
        lambda: hvd.allreduce(tf.ones([17 + rank])),
        lambda: hvd.allreduce(tf.ones([2] * (1 + odd))),
        lambda: hvd.allreduce(tf.ones([4], tf.float32 if odd else tf.int32)),
        lambda: hvd.allreduce(tf.ones([4]), op=hvd.Sum if odd else hvd.Max),
        lambda: hvd.allreduce(tf.ones([4]), prescale_factor=1.0 + odd),
        lambda: hvd.grouped_allreduce([tf.ones([4]), tf.ones([4 + odd])]),
        lambda: hvd.allgather(tf.ones([3, 2 + odd])),
        lambda: hvd.allgather(tf.ones([3], tf.float32 if odd else tf.int32)),
        lambda: hvd.broadcast(tf.ones([3]), rank),
        lambda: hvd.broadcast(tf.ones([3 + odd]), 0),
        lambda: hvd.broadcast(tf.ones([3], tf.float32 if odd else tf.float64), 0),
        lambda: hvd.alltoall(tf.ones([size, 1 + odd])),
        lambda: hvd.alltoall(tf.ones([size], tf.float32 if odd else tf.int32)),
        lambda: hvd.reducescatter(tf.ones([4, 1 + odd])),
        lambda: hvd.reducescatter(tf.ones([4], tf.float32 if odd else tf.int32)),
        lambda: hvd.grouped_reducescatter([tf.ones([4]), tf.ones([4 + odd])]),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(MISMATCH) as told:
            call()
        assert isinstance(told.value, HorovodInternalError), number
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        tf.function(lambda: hvd.allreduce(tf.ones([2 + rank])))()
    assert float(hvd.allreduce(1.0)) == 1.0


def test_what_one_rank_sees_to_be_wrong():
    size = hvd.size()
    for call in (
        lambda: hvd.alltoall(tf.ones([4]), splits=[1] * (size + 1)),
        lambda: hvd.alltoall(tf.ones([4]), splits=[5] * size),
        lambda: (
            hvd.alltoall(tf.ones([4]), splits=[-1] * (size - 1) + [3 + size])
            if size > 1
            else hvd.alltoall(tf.ones([4]), [3])
        ),
        lambda: hvd.alltoall(tf.constant(1.0)),
        lambda: hvd.reducescatter(tf.constant(1.0)),
        lambda: hvd.broadcast(tf.ones([2]), size),
        lambda: hvd.broadcast(tf.ones([2]), -1),
        lambda: hvd.broadcast_object(1, root_rank=size),
    ):
        with pytest.raises((tf.errors.InvalidArgumentError, HorovodInternalError)):
            call()
    for call in (
        lambda: hvd.alltoall(tf.ones([size]), splits=tf.ones([size])),
        lambda: hvd.allreduce(tf.constant(["text"])),
        lambda: hvd.broadcast(tf.constant(["text"]), 0),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()
    assert hvd.alltoall(tf.ones([size]), splits=tf.ones([size], tf.int64))[1].numpy().tolist() == [1] * size


def test_gradients():
    """Horovod's: what allgather and broadcast hand back is averaged, of a sum by reducescatter multiplied."""
    rank, size = hvd.rank(), hvd.size()
    x = tf.Variable(tf.ones([size, 2]))
    ones = np.ones((size, 2))
    rows = [k + 1 for k in range(size)]
    cases = [
        (lambda: hvd.allreduce(x, op=hvd.Sum), size * ones),
        (lambda: hvd.allreduce(x), ones),
        (lambda: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 6 * size * ones),
        (lambda: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), size * ones),
        (lambda: hvd.allgather(x), ones),
        (lambda: hvd.allgather(x[: rank + 1]), (np.arange(size)[:, None] <= rank) * ones),
        (lambda: hvd.broadcast(x, 0), (rank == 0) * ones),
        (lambda: hvd.alltoall(x), ones),
        (lambda: hvd.alltoall(tf.repeat(x, rows, 0), splits=rows)[0], np.array(rows)[:, None] * ones),
        (lambda: hvd.reducescatter(x, op=hvd.Sum), size * ones),
        (lambda: hvd.reducescatter(x), ones),
        (lambda: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), 3 * size * ones),
        (lambda: hvd.grouped_allgather([x, 2 * x]), 3 * ones),
        (lambda: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum), 3 * size * ones),
    ]
    for number, (call, wanted) in enumerate(cases):
        with tf.GradientTape() as tape:
            result = call()
        assert np.allclose(tape.gradient(result, x), wanted), number

    @tf.function(autograph=False)  # it would look for the source of each lambda
    def graph():
        gradients = []
        for call, _ in cases:
            with tf.GradientTape() as tape:
                result = call()
            gradients.append(tape.gradient(result, x))
        return gradients

    for number, (gradient, (_, wanted)) in enumerate(zip(graph(), cases, strict=True)):
        assert np.allclose(gradient, wanted), number


def adasum(vectors):
    """Pairs of vectors a, b become (1 - ab/2aa) a + (1 - ab/2bb) b, in a tree over the ranks."""
    if len(vectors) == 1:
        return vectors[0]
    a, b = adasum(vectors[: len(vectors) // 2]), adasum(vectors[len(vectors) // 2 :])
    dot = np.sum(a * b)
    return (1 - dot / (2 * np.sum(a * a))) * a + (1 - dot / (2 * np.sum(b * b))) * b


@pytest.mark.skipif(WORKERS > 1, reason="one rank in the place of four, which would take long to start")
def test_adasum_of_four():
    vectors = [np.random.default_rng(rank).normal(size=8) for rank in range(4)]

    class Engine:
        def gather(self, flat, group):
            return tf.constant(vectors)

    result = _adasum.adasum(tf.constant(vectors[2]), [3, 5], Engine(), Group(0, 4, 2))
    for part in (slice(0, 3), slice(3, 8)):
        assert np.allclose(result[part], adasum([each[part] for each in vectors]), rtol=1e-12)


def test_adasum():
    size = hvd.size()
    if size == 3:
        with pytest.raises(NotImplementedError, match="3 ranks"):
            hvd.allreduce(tf.ones([2]), op=hvd.Adasum)
        return
    vectors = [np.random.default_rng(rank).normal(size=8) for rank in range(size)]
    orthogonal = np.eye(size)
    for dtype, close in ((tf.float16, 1e-2), (tf.float32, 1e-6), (tf.float64, 1e-12)):
        result = hvd.allreduce(tf.cast(tf.constant(vectors[hvd.rank()]), dtype), op=hvd.Adasum)
        assert np.allclose(result, adasum(vectors), rtol=close, atol=close)
        assert len({np.asarray(each).tobytes() for each in hvd.allgather_object(result.numpy())}) == 1
        same_vector = hvd.allreduce(tf.cast(tf.constant(vectors[0]), dtype), op=hvd.Adasum)
        assert np.allclose(same_vector, vectors[0], rtol=close, atol=close)  # of equal vectors, one
        apart = hvd.allreduce(tf.cast(tf.constant(orthogonal[hvd.rank()]), dtype), op=hvd.Adasum)
        assert np.allclose(apart, 1.0, atol=close)  # of orthogonal ones, the sum
    graph = tf.function(lambda x: hvd.allreduce(x, op=hvd.Adasum))(tf.constant(orthogonal[hvd.rank()]))
    assert np.allclose(graph, 1.0)
    with pytest.raises((ValueError, NotImplementedError, tf.errors.OpError)):
        hvd.allreduce(tf.constant([1, 2]), op=hvd.Adasum)


def test_process_sets():
    rank, size = hvd.rank(), hvd.size()
    assert hvd.global_process_set.process_set_id == 0
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (size, rank)
    with pytest.raises(ValueError):
        hvd.add_process_set([0, 0])
    with pytest.raises(ValueError):
        hvd.add_process_set([size])
    with pytest.raises(ValueError):
        hvd.add_process_set([*range(size)])  # all ranks: exists
    if size == 1:
        return
    last = hvd.add_process_set(hvd.ProcessSet([size - 1, 1]) if size > 2 else hvd.ProcessSet([1]))
    first = hvd.add_process_set([0])
    members = [1, 2] if size > 2 else [1]
    assert last.ranks == members
    assert last.process_set_id != first.process_set_id
    assert int(hvd.process_set_included_op(last.process_set_id)) == int(rank in members)
    assert int(hvd.size_op(last.process_set_id)) == len(members)
    assert {tuple(ranks) for ranks in hvd.get_process_set_ids_and_ranks().values()} >= {(0,), tuple(members)}
    if rank in members:
        assert (last.included(), last.rank(), last.size()) == (True, members.index(rank), len(members))
        for form in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=last)):
            assert form(tf.constant([float(rank)])).numpy().tolist() == [float(sum(members))]
        assert hvd.allgather(tf.constant([rank]), process_set=last).numpy().tolist() == members
        assert int(hvd.broadcast(tf.constant(rank), members[-1], process_set=last)) == members[-1]
        assert hvd.alltoall(tf.fill([len(members)], rank), process_set=last).numpy().tolist() == members
        assert hvd.reducescatter(tf.ones([2]), op=hvd.Sum, process_set=last).shape == (2 // len(members),)
        assert hvd.grouped_allreduce([tf.ones([2])], op=hvd.Sum, process_set=last)[0].numpy()[0] == len(
            members
        )
        assert hvd.allgather_object(rank, process_set=last) == members
        assert hvd.broadcast_object(rank, members[0], process_set=last) == members[0]
        with pytest.raises((ValueError, HorovodInternalError)):
            hvd.broadcast(tf.ones([1]), 0, process_set=last)
        variable = tf.Variable(float(rank))
        hvd.broadcast_variables([variable], members[0], process_set=last)
        assert variable.numpy() == members[0]
    else:
        with pytest.raises((ValueError, HorovodInternalError)):
            hvd.allreduce(tf.ones([1]), process_set=last)
    assert hvd.remove_process_set(last)
    assert last.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(first)


@pytest.mark.parametrize("graph", [False, True])
def test_join_with_unequal_numbers_of_steps(graph):
    size = hvd.size()

    def reduce(x):
        return hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x)

    call = tf.function(reduce) if graph else reduce
    for number in range(2 + hvd.rank()):
        left = sum(2 + other > number for other in range(size))
        total, mean = call(tf.ones([3]))
        assert np.allclose(total, left)
        assert np.allclose(mean, left / size)
    assert int(hvd.join()) == size - 1
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == size


@pytest.mark.skipif(WORKERS == 1, reason="nobody else has joined")
def test_what_cannot_be_done_with_ranks_that_have_joined():
    if hvd.rank() == 0:
        hvd.join()
    else:
        while True:  # until rank 0 has come to its join
            try:
                hvd.allreduce(tf.ones([1]), name="until")
                hvd.allgather(tf.ones([1]), name="rows")
            except HorovodInternalError:
                break
        hvd.join()


def test_timeline(tmp_path):
    path = str(tmp_path / "timeline.json")
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(tf.ones([3]), name="seen")
    hvd.allgather(tf.ones([3]), name="rows")
    hvd.stop_timeline()
    hvd.allreduce(tf.ones([3]), name="unseen")
    if hvd.rank() == 0:
        text = Path(path).read_text()
        events = json.loads(text)
        assert len(events) > 4
        assert "seen" in text
        assert "rows" in text
        assert "unseen" not in text
        assert "NEGOTIATE_ALLREDUCE" in text


def test_graphs_of_tensorflow_1():
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=float(hvd.rank()))
        total = hvd.allreduce(variable, op=hvd.Sum)
        hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1)
        with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as session:
            assert session.run(variable) == hvd.size() - 1
            assert session.run(total) == hvd.size() * (hvd.size() - 1)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", initializer=float(hvd.rank()))
        operation = hvd.broadcast_global_variables(0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(operation)
        assert session.run(variable) == 0
    with pytest.raises(RuntimeError, match="does not support eager"):
        hvd.broadcast_global_variables(0)


def test_begin_and_end():
    hvd.init()  # changes nothing
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(tf.ones([1])), lambda: hvd.broadcast_object(1)):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
    assert int(hvd.process_set_included_op(0)) == -1
    hvd.init(process_sets=[hvd.ProcessSet([0])] if WORKERS > 1 else None)
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()
