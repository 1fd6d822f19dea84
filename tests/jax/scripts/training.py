"""N workers are one worker, in every style of DistributedOptimizer; writes nothing, asserts everything."""
# ruff: noqa: PT017, E731, PLR0917 - a script of asserts that runs on all ranks

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import hora.jax as hora
from hora.core.errors import GradientError

hora.init()

RANK, SIZE = hora.rank(), hora.size()
draw = np.random.default_rng(0)
X = draw.normal(size=(96, 8)).astype(np.float32)
Y = (X @ draw.normal(size=(8, 1))).astype(np.float32)
START = {
    "w1": (draw.normal(size=(8, 16)) * 0.3).astype(np.float32),
    "b1": np.zeros(16, np.float32),
    "w2": (draw.normal(size=(16, 1)) * 0.3).astype(np.float32),
}
GLOBAL_BATCH, EPOCHS = 24, 3


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] - y) ** 2)


def step_of(optimizer, params, state, x, y, reduce):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, reduce(loss)


gradient = jax.jit(jax.value_and_grad(loss_of))
apply = jax.jit(optax.apply_updates)


def make(kind):
    return {"sgd": lambda: optax.sgd(0.1, momentum=0.9), "adam": lambda: optax.adam(0.01)}[kind]()


def alone(kind, passes=1):
    """One worker on the global batches, by JAX and Optax alone."""
    optimizer = optax.MultiSteps(make(kind), passes) if passes > 1 else make(kind)
    params = jax.tree.map(jnp.asarray, START)
    state = optimizer.init(params)
    step = jax.jit(lambda p, s, x, y: step_of(optimizer, p, s, x, y, lambda loss: loss))
    from hora.adapter.order import epoch_order

    losses = []
    for epoch in range(EPOCHS):
        order = epoch_order(len(X), seed=1, epoch=epoch, shuffle=True)
        for start in range(0, len(X), GLOBAL_BATCH):
            chosen = order[start : start + GLOBAL_BATCH]
            params, state, loss = step(params, state, X[chosen], Y[chosen])
            losses.append(float(loss))
    return params, losses


def together(kind, style, passes=1, **options):
    """All workers, from different weights that are broadcast."""
    mine = jax.tree.map(lambda each: each + np.float32(RANK), START)
    params = hora.broadcast_parameters(mine)
    optimizer = hora.DistributedOptimizer(
        make(kind), backward_passes_per_step=passes, style="gspmd" if style == "gspmd" else "auto", **options
    )
    if style == "spmd":
        step = hora.spmd(
            lambda p, s, x, y: step_of(optimizer, p, s, x, y, hora.allreduce), split=("x", "y"), donate=(0, 1)
        )
        state = optimizer.init(params)
    elif style == "gspmd":
        params = hora.replicate(params)
        state = optimizer.init(params)
        compiled = hora.watched(jax.jit(lambda p, s, x, y: step_of(optimizer, p, s, x, y, lambda loss: loss)))
        step = lambda p, s, x, y: compiled(p, s, hora.global_array(x), hora.global_array(y))
    else:
        state = optimizer.init(params)

        def step(p, s, x, y):
            loss, gradients = gradient(p, x, y)
            updates, s = optimizer.update(gradients, s, p)
            return apply(p, updates), s, hora.mean(loss, weight=len(x))

    losses = []
    loader = hora.data_loader((X, Y), global_batch=GLOBAL_BATCH, seed=1)
    for _ in range(EPOCHS):
        for x, y in loader:
            params, state, loss = step(params, state, x, y)
            losses.append(float(loss))
    return hora.local((params, state)), losses


for kind in ("sgd", "adam"):
    expected, curve = alone(kind)
    for style in ("spmd", "gspmd", "eager"):
        (params, state), losses = together(kind, style)
        everyone = hora.allgather_object(
            [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))]
        )
        assert all(other == everyone[0] for other in everyone), (kind, style, "replicas differ")
        worst = max(float(np.abs(np.asarray(params[name]) - expected[name]).max()) for name in expected)
        assert worst <= 1e-6, (kind, style, worst)
        np.testing.assert_allclose(losses, curve, rtol=1e-5)
        print(f"{kind} {style}: {worst:.1e}", flush=True)
for style in ("spmd", "eager") if SIZE == 2 else ():
    expected, _ = alone("adam", passes=3)
    (params, _), _ = together("adam", style, passes=3)
    worst = max(float(np.abs(np.asarray(params[name]) - expected[name]).max()) for name in expected)
    assert worst <= 1e-6, ("passes", style, worst)
    everyone = hora.allgather_object([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)])
    assert all(other == everyone[0] for other in everyone)
if SIZE == 2:
    _, losses = together("sgd", "spmd", gradient_predivide_factor=4.0, compression=hora.Compression.bf16)
    assert losses[-1] < 0.3 * losses[0]

# --- what would be wrong in silence is refused ----------------------------------------------------

optimizer = hora.DistributedOptimizer(make("sgd"))
params = jax.tree.map(jnp.asarray, START)
state = optimizer.init(params)
try:
    jax.jit(lambda p, s, x, y: step_of(optimizer, p, s, x, y, lambda loss: loss))(params, state, X[:4], Y[:4])
except GradientError as error:
    assert 'style="gspmd"' in str(error)
    assert "hora.spmd" in str(error)
else:
    raise AssertionError("plain jit was not refused")

summing = jax.jit(
    jax.shard_map(
        lambda p, s, x, y: step_of(optimizer, p, s, x, y, lambda loss: jax.lax.pmean(loss, hora.AXIS)),
        mesh=hora.mesh(),
        in_specs=(P(), P(), P(hora.AXIS), P(hora.AXIS)),
        out_specs=P(),
    )
)
rows = GLOBAL_BATCH // SIZE
try:
    summing(*hora.replicate((params, state)), *hora.global_array((X[:rows], Y[:rows])))
except GradientError as error:
    assert "check_vma=False" in str(error)
else:
    raise AssertionError("gradients that JAX had added up were not refused")
if SIZE > 1:
    try:
        hora.DistributedOptimizer(make("sgd"), style="gspmd").init(params)
    except GradientError as error:
        assert "hora.replicate" in str(error)
    else:
        raise AssertionError("parameters of one rank were not refused")
print("done", flush=True)
