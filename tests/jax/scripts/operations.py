"""Every operation and dtype against NumPy in float64, outside of jit and inside. Runs on any number of
ranks.
"""
# ruff: noqa: PT017, RUF017, PLW0108, B905 - a script of asserts that runs on all ranks

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import hora.jax as hora
from hora.adapter.order import epoch_order
from hora.core.errors import CollectiveError, GlobalBatchError, GradientError, UsageError

hora.init()

RANK, SIZE = hora.rank(), hora.size()
FLOATS = ["float16", "bfloat16", "float32", "float64"]
WHOLE = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*FLOATS, *WHOLE, *COMPLEX, "bool"]
EPSILON = {
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float32": 1e-6,
    "float64": 1e-15,
    "complex64": 1e-6,
    "complex128": 1e-15,
}
SHAPES = [(2, 3), (), (0,), (5,)]  # all of them for float32
checks = 0


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def values(name, shape, rank, salt=0):
    """What a rank gives; every rank can compute that of all."""
    draw = np.random.default_rng([rank, salt, len(shape)])
    if name == "bool":
        return draw.random(shape) < 0.6
    if name in WHOLE:
        return draw.integers(0, 7, shape).astype(name)
    real = draw.uniform(0.5, 2.0, shape)
    if name in COMPLEX:
        return np.asarray(real + 1j * draw.uniform(-1, 1, shape)).astype(name)
    return np.asarray(real).astype(dtype_of(name))


def shapes_of(name):
    return SHAPES if name == "float32" else SHAPES[:1]


def exact(array):
    array = np.asarray(array)
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(object) if array.dtype.kind in "iu" else array.astype(np.float64)


def check(found, expected, name, what, *, wide=1.0):
    global checks
    checks += 1
    found = np.asarray(found)
    assert found.dtype == dtype_of(name), (what, found.dtype, name)
    assert found.shape == np.shape(expected), (what, found.shape, np.shape(expected))
    if name in EPSILON:
        bound = wide * EPSILON[name]
        np.testing.assert_allclose(exact(found), exact(expected), rtol=bound, atol=bound, err_msg=str(what))
    else:
        wrapped = np.asarray(expected)
        if name in WHOLE:
            bits = dtype_of(name).itemsize * 8
            wrapped = np.vectorize(lambda x: int(x) & (2**bits - 1), otypes=[object])(wrapped)
            found = np.vectorize(lambda x: int(x) & (2**bits - 1), otypes=[object])(found)
        assert (found == wrapped).all(), (what, found, wrapped)


def reduced(arrays, op):
    wide = [exact(array) for array in arrays]
    if op is hora.Average:
        return sum(wide) / len(wide)
    if op is hora.Sum:
        return sum(wide)
    if op is hora.Product:
        return np.multiply.reduce(wide)
    return (np.minimum if op is hora.Min else np.maximum).reduce(wide)


def allowed(name, op):
    if name == "bool":
        return op in (hora.Min, hora.Max)
    if name in COMPLEX:
        return op in (hora.Sum, hora.Average, hora.Product)
    return name in FLOATS or op is not hora.Average


def inside(body, *arguments, split_results=False):
    """Run a body inside ``shard_map``, each rank on its own arrays."""
    step = hora.spmd(
        lambda *trees: jax.tree.map(
            lambda each: each[None], body(*(jax.tree.map(lambda a: a[0], t) for t in trees))
        ),
        split=tuple(range(len(arguments))),
        results="split",
    )
    stacked = [jax.tree.map(lambda array: np.asarray(array)[None], tree) for tree in arguments]
    return jax.tree.map(lambda array: np.asarray(array)[0], hora.local(step(*stacked)))


def refused(call, *words):
    global checks
    checks += 1
    try:
        call()
    except hora_errors as error:
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(f"nothing was raised: {words}")


hora_errors = (CollectiveError, GlobalBatchError, GradientError, UsageError)

# --- allreduce ------------------------------------------------------------------------------------
OPS = (hora.Average, hora.Sum, hora.Min, hora.Max, hora.Product)
FEW = ("float32", "bfloat16", "int32")


def names_for(op, where):
    """Every dtype inside jit; outside, which runs the same arithmetic, every dtype once."""
    names = [name for name in DTYPES if allowed(name, op)]
    return [name for name in names if where == "jit" or op is hora.Sum or name in (*FEW, "bool")]


trees = {
    op: {name: [values(name, shape, RANK) for shape in shapes_of(name)] for name in names_for(op, "jit")}
    for op in OPS
}
inner = inside(
    lambda *given: tuple(hora.allreduce(tree, op=op) for op, tree in zip(OPS, given)), *trees.values()
)
for op, made in zip(OPS, inner):
    outer = hora.allreduce({name: trees[op][name] for name in names_for(op, "host")}, op=op)
    for where, found in (("host", outer), ("jit", made)):
        for name in found:
            for place, shape in enumerate(shapes_of(name)):
                expected = reduced([values(name, shape, rank) for rank in range(SIZE)], op)
                check(found[name][place], expected, name, (where, op, name, shape), wide=8.0)
scaled = {name: values(name, (7,), RANK, 1) for name in [*FLOATS, *COMPLEX]}
for op, found in (
    (hora.Sum, hora.allreduce(scaled, op=hora.Sum, prescale_factor=0.5, postscale_factor=3.0)),
    (hora.Average, inside(lambda t: hora.allreduce(t, prescale_factor=0.5, postscale_factor=3.0), scaled)),
):
    for name in scaled:
        expected = 1.5 * reduced([values(name, (7,), rank, 1) for rank in range(SIZE)], op)
        check(found[name], expected, name, ("scaled", op, name), wide=8.0)
wide = values("float32", (100,), RANK, 2)
for compression, error in ((hora.Compression.fp16, 1e-3), (hora.Compression.bf16, 1e-2)):
    for found in (
        hora.allreduce(wide, compression=compression),
        inside(lambda array, c=compression: hora.allreduce(array, compression=c), wide),
    ):
        assert np.asarray(found).dtype == np.float32
        mean = reduced([values("float32", (100,), rank, 2) for rank in range(SIZE)], hora.Average)
        np.testing.assert_allclose(np.asarray(found), mean, rtol=error * SIZE)
half = np.full(4, 2049.0 if RANK == 0 else 1.0, ml_dtypes.bfloat16)  # 2048 in bfloat16: added in float32
total = float(np.float32(half[0])) if SIZE == 1 else 2048.0 + (SIZE - 1) * 1.0
assert np.asarray(hora.allreduce(half, op=hora.Sum)).astype(np.float32)[0] == np.float32(
    ml_dtypes.bfloat16(total)
)
if SIZE in (1, 2):
    one = {"a": values("float64", (6,), RANK, 3), "b": values("float64", (2, 2), RANK, 4)}
    for found in (
        hora.allreduce(one, op=hora.Adasum),
        inside(lambda t: hora.allreduce(t, op=hora.Adasum), one),
    ):
        for name, salt in (("a", 3), ("b", 4)):
            given = [values("float64", one[name].shape, rank, salt) for rank in range(SIZE)]
            expected = given[0]
            if SIZE == 2:
                a, b = given
                dot = (a * b).sum()
                expected = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
            check(found[name], expected, "float64", ("adasum", name), wide=10)
else:
    refused(lambda: hora.allreduce(np.ones(2), op=hora.Adasum), "Adasum", "3 ranks")
both = hora.grouped_allreduce([np.float32(RANK), np.ones(2, np.int32)], op=hora.Sum)
assert float(both[0]) == sum(range(SIZE))
assert (np.asarray(both[1]) == SIZE).all()
refused(lambda: hora.allreduce(np.ones(2, bool), op=hora.Sum), "bool", "hora.Max")
refused(lambda: hora.allreduce(np.ones(2, np.int32)), "Average", "truncated")
refused(lambda: hora.allreduce(np.ones(2, np.complex64), op=hora.Min), "complex")
refused(lambda: hora.allreduce("text"), "str")
refused(lambda: jax.jit(hora.allreduce)(jnp.ones(2)), "hora.spmd", "jit")
slope = inside(
    lambda x: jax.grad(lambda y: (hora.allreduce(y, op=hora.Sum) ** 2).sum())(x), np.full(3, RANK + 1.0)
)
assert np.isfinite(slope).all()

# --- allgather ------------------------------------------------------------------------------------
tree = {name: values(name, (RANK, 3), RANK, 5) for name in DTYPES}  # rank 0 has no rows
found = hora.allgather(tree)
for name in DTYPES:
    expected = np.concatenate([values(name, (rank, 3), rank, 5) for rank in range(SIZE)])
    assert np.asarray(found[name]).tobytes() == expected.tobytes(), name
    assert found[name].shape == expected.shape
    assert found[name].dtype == expected.dtype
same = {name: values(name, (2, 3), RANK, 6) for name in DTYPES}
found = inside(hora.allgather, same)
for name in DTYPES:
    expected = np.concatenate([values(name, (2, 3), rank, 6) for rank in range(SIZE)])
    assert np.asarray(found[name]).tobytes() == expected.tobytes(), name
assert np.asarray(hora.allgather(np.float32(RANK))).tolist() == list(range(SIZE))
assert hora.grouped_allgather([np.zeros((0, 2)), np.ones(1)])[0].shape == (0, 2)

# --- broadcast ------------------------------------------------------------------------------------
root = SIZE - 1
tree = {name: values(name, (2, 2), RANK, 7) for name in DTYPES}
tree["key"] = jax.random.key(RANK)
tree["odd"] = np.array([-0.0, np.nan, 1e-42], np.float32) * (1 if root == RANK else 3)
expected = {name: values(name, (2, 2), root, 7) for name in DTYPES}
found = hora.broadcast(tree, root)
for name in DTYPES:
    assert np.asarray(found[name]).tobytes() == expected[name].tobytes(), name
assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(root))).all()
assert np.asarray(found["odd"]).tobytes() == (np.array([-0.0, np.nan, 1e-42], np.float32)).tobytes()
found = inside(lambda t: hora.broadcast(t, root), {name: tree[name] for name in DTYPES})
for name in DTYPES:
    assert np.asarray(found[name]).tobytes() == expected[name].tobytes(), ("inside", name)
refused(lambda: hora.broadcast(np.ones(1), SIZE), "root_rank", "rank of this job")
params = {"w": np.full((3,), RANK, np.float32), "b": jnp.asarray(float(RANK))}
whole = hora.replicate(hora.broadcast_parameters(params, root))
assert float(whole["b"]) == root
again = hora.broadcast_parameters(whole)
assert again["w"].sharding == whole["w"].sharding
assert (np.asarray(hora.local(again)["w"]) == root).all()

# --- alltoall -------------------------------------------------------------------------------------
for name in DTYPES:
    splits = [(RANK + other) % 3 for other in range(SIZE)]
    given = values(name, (sum(splits), 2), RANK, 8)
    output, counts = hora.alltoall(given, splits)
    assert counts.tolist() == splits  # as (a + b) % 3 is the same both ways
    parts = []
    for rank in range(SIZE):
        theirs = [(rank + other) % 3 for other in range(SIZE)]
        begin = sum(theirs[:RANK])
        parts.append(values(name, (sum(theirs), 2), rank, 8)[begin : begin + theirs[RANK]])
    assert np.asarray(output).tobytes() == np.concatenate(parts).tobytes(), name
even = np.arange(2 * SIZE, dtype=np.float32) + 100 * RANK
expected = np.concatenate([np.arange(2 * RANK, 2 * RANK + 2) + 100 * rank for rank in range(SIZE)])
assert np.asarray(hora.alltoall(even)).tolist() == expected.tolist()
assert inside(hora.alltoall, even).tolist() == expected.tolist()
refused(lambda: hora.alltoall(even, [1] * (SIZE + 1)), "splits")
refused(lambda: hora.alltoall(even, [1] * (SIZE - 1) + [3 * SIZE]), "do not sum")

# --- reducescatter --------------------------------------------------------------------------------
rows = 2 * SIZE
trees = {
    op: {
        name: values(name, (rows, 2), RANK, 9)
        for name in DTYPES
        if allowed(name, op) and (name in FEW or op is hora.Sum or name == "bool")
    }
    for op in OPS
}
inner = inside(
    lambda *given: tuple(hora.reducescatter(tree, op=op) for op, tree in zip(OPS, given)), *trees.values()
)
for op, made in zip(OPS, inner):
    for where, found in (("host", hora.reducescatter(trees[op], op=op)), ("jit", made)):
        for name in found:
            whole = reduced([values(name, (rows, 2), rank, 9) for rank in range(SIZE)], op)
            check(found[name], whole[2 * RANK : 2 * RANK + 2], name, (where, op, name), wide=8.0)
uneven = values("float64", (SIZE + 1, 2), RANK, 10)
whole = reduced([values("float64", (SIZE + 1, 2), rank, 10) for rank in range(SIZE)], hora.Sum)
first = 0 if RANK == 0 else RANK + 1
check(
    hora.reducescatter(uneven, op=hora.Sum),
    whole[first : first + (2 if RANK == 0 else 1)],
    "float64",
    "uneven",
    wide=8,
)
program = hora.spmd(lambda x: hora.reducescatter(x, op=hora.Sum), split=0, results="split")
text = program.lower(np.ones((SIZE, 2), np.float32)).as_text()
assert "reduce_scatter" not in text  # jax#40831
assert SIZE == 1 or "all_to_all" in text

# --- process sets ---------------------------------------------------------------------------------
if SIZE == 3:
    pair = hora.add_process_set([0, 2])
    assert (pair.process_set_id, pair.size(), pair.included()) == (1, 2, RANK != 1)
    if pair.included():
        assert float(hora.allreduce(np.float32(RANK + 1), op=hora.Sum, process_set=pair)) == 4.0
        assert np.asarray(hora.allgather(np.full(1, RANK), process_set=pair)).tolist() == [0, 2]
        assert float(hora.broadcast(np.float32(RANK), 2, process_set=pair)) == 2.0
        received = hora.alltoall(np.array([RANK, RANK + 10]), process_set=pair)
        assert np.asarray(received).tolist() == ([0, 2] if RANK == 0 else [10, 12])
        rows = hora.reducescatter(np.arange(2.0) + RANK, op=hora.Sum, process_set=pair)
        assert np.asarray(rows).tolist() == ([2.0] if RANK == 0 else [4.0])
        assert hora.allgather_object(RANK, process_set=pair) == [0, 2]
        hora.barrier(process_set=pair)
    else:
        refused(lambda: hora.allreduce(np.float32(1), process_set=pair), "not in")
    found = inside(lambda x: hora.allreduce(x, op=hora.Sum, process_set=pair), np.float32(RANK + 1))
    assert float(found) == (2.0 if RANK == 1 else 4.0)
    found = inside(lambda x: hora.broadcast(x, 2, process_set=pair), np.float32(RANK))
    assert float(found) == (1.0 if RANK == 1 else 2.0)
    assert inside(lambda x: hora.allgather(x, process_set=pair), np.full(1, RANK)).tolist() == [0, 2]
    assert hora.process_set_ids() == [0, 1]
    assert hora.remove_process_set(pair)
    refused(lambda: hora.allreduce(np.float32(1), process_set=pair), "add")

# --- objects, means, arrays, data -----------------------------------------------------------------
assert hora.broadcast_object({"rank": RANK}, root) == {"rank": root}
assert hora.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]
weights = [rank + 1 for rank in range(SIZE)]
expected = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
assert abs(hora.mean(jnp.float32(RANK), weight=RANK + 1) - expected) < 1e-12
assert hora.mean({"loss": RANK, "one": 1.0}, weight=1) == {"loss": (SIZE - 1) / 2, "one": 1.0}
batch = hora.global_array({"x": np.full((2, 2), RANK, np.float32)})
assert batch["x"].shape == (2 * SIZE, 2)
assert float(jax.jit(jnp.sum)(batch["x"])) == 4 * sum(range(SIZE))
assert (np.asarray(hora.local(batch)["x"]) == RANK).all()
if SIZE > 1:
    refused(lambda: hora.allreduce(batch), "global array")
data = (np.arange(26), np.arange(26) * 2.0)
loader = hora.data_loader(data, global_batch=6, seed=3)
seen = [np.concatenate(hora.allgather_object(x)) for _ in range(2) for x, y in loader]

orders = [epoch_order(26, seed=3, epoch=epoch, shuffle=True)[:24] for epoch in range(2)]
assert np.concatenate(seen).tolist() == np.concatenate(orders).tolist()
loader.load_state_dict({"position": 12})
assert len(list(loader)) == 2
uneven = hora.data_loader([{"x": index} for index in range(7)], global_batch=5, shuffle=False, tail="uneven")
assert sum((part["x"].tolist() for each in uneven for part in hora.allgather_object(each)), []) == list(
    range(7)
)
if SIZE > 1:
    refused(lambda: hora.data_loader(data, global_batch=SIZE + 1), "divide")
hora.barrier()
assert checks > 120
print(f"rank {RANK} of {SIZE}: {checks} checks", flush=True)
