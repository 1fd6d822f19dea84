"""Optax in a compiled step: ``train.py [FAULT...]`` trains rightly, in three styles, or with faults."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hora.jax as hora

faults = set(sys.argv[1:])
hora.init()
rank, size = hora.rank(), hora.size()
rng = np.random.default_rng(1)
x, y = rng.normal(size=(48, 5)).astype(np.float32), rng.integers(0, 3, 48)
own = np.random.default_rng(rank if "not-broadcast" in faults else 7)
params = {"b": jnp.zeros(3), "w": jnp.asarray(own.normal(size=(5, 3)), jnp.float32)}
if "not-broadcast" not in faults:
    params = hora.broadcast_parameters(params)
rate = 0.05 * (size if "rate" in faults else 1)
optimizer = optax.sgd(rate, momentum=0.9)
if "inner-clip" in faults:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optimizer)
if "never-averaged" not in faults:
    style = "gspmd" if "gspmd" in faults else "auto"
    op = hora.Sum if "summed" in faults else hora.Average
    optimizer = hora.DistributedOptimizer(optimizer, op=op, style=style)
if "clipped" in faults:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optimizer)
if "gspmd" in faults:
    params = hora.replicate(params)
state = optimizer.init(params)
key = jax.random.key(3)


def loss_of(params, x, y):
    if "batch-norm" in faults or "sync-batch-norm" in faults:
        mean, square = x.mean(0), (x**2).mean(0)
        if "sync-batch-norm" in faults:
            mean, square = (jax.lax.pmean(each, hora.AXIS) for each in (mean, square))
        x = (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3)
    if "dropout" in faults:
        x = x * jax.random.bernoulli(jax.random.fold_in(key, rank), 0.6, x.shape) / 0.6
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


if "gspmd" in faults:
    compiled = hora.watched(jax.jit(step))
elif "never-averaged" in faults:
    compiled = jax.jit(step)
elif not faults & {"eager", "unequal"}:
    compiled = hora.spmd(step, split=("x", "y"))
else:
    compiled = step


def batches():
    if "same-data" in faults:
        order = np.arange(48)
    elif "batch-per-worker" in faults:
        order = np.arange(rank, 48, size)
    elif "own-order" in faults:
        order = np.random.default_rng(size).permutation(48).reshape(4, size, -1)[:, rank].reshape(-1)
    elif "unequal" in faults:
        for first in range(0, 48, 12):
            share = slice(first, first + 12)
            if size > 1:
                share = slice(first, first + 9) if rank == 0 else slice(first + 9, first + 12)
            yield x[share], y[share]
        return
    else:
        yield from hora.data_loader((x, y), global_batch=12, seed=1)
        return
    share = 12 // size if "own-order" in faults else 12
    for first in range(0, len(order), share):
        yield x[order[first : first + share]], y[order[first : first + share]]


for _ in range(2):
    for features, labels in batches():
        batch = hora.global_array((features, labels)) if "gspmd" in faults else (features, labels)
        params, state, loss = compiled(params, state, *batch)
