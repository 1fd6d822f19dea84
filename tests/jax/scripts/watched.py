"""Trainings that are as they should be, in three styles, then some with a fault that the guard tells."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hora.jax as hora

hora.init()
rank = hora.rank()
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)


def loss_of(params, x, y):
    return jnp.mean(jnp.square(x @ params["weights"] + params["bias"] - y))


def started():
    params = {"weights": jnp.ones([4, 1]), "bias": jnp.zeros([1])}
    optimizer = hora.DistributedOptimizer(optax.sgd(0.01))
    return hora.broadcast_parameters(params), optimizer, optimizer.init(params)


def compiled(batches):
    params, optimizer, state = started()

    @hora.spmd(split=("x", "y"))
    def step(params, state, x, y):
        gradients = jax.grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = step(params, state, *batch)
    jax.block_until_ready(params)


def own_program(batches):
    optimizer = hora.DistributedOptimizer(optax.sgd(0.01), style="gspmd")
    params = hora.replicate(started()[0])
    state = optimizer.init(params)

    @hora.watched
    @jax.jit
    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches:
        params, state, _ = step(params, state, *hora.global_array(batch))
    jax.block_until_ready(params)


def outside(batches, after=lambda number, params: params):
    params, optimizer, state = started()
    gradients_of = jax.jit(jax.grad(loss_of))
    for number, batch in enumerate(batches):
        updates, state = optimizer.update(gradients_of(params, *batch), state, params)
        params = after(number, optax.apply_updates(params, updates))


def ours():
    return hora.data_loader((x, y), global_batch=8)


def theirs():
    return ((x[at : at + 8], y[at : at + 8]) for at in range(0, 64, 8))


def spoilt(batches):
    for number, (images, targets) in enumerate(batches):
        yield images * np.float32(np.nan if (number, rank) == (4, 1) else 1), targets


def moved(number, params):
    return params if number != 2 else params | {"bias": params["bias"] + 0.1 * rank}


compiled(ours())
own_program(ours())
outside(ours())
print(f"all was right at {time.time()}", flush=True)
own_program(theirs())
compiled(spoilt(ours()))
outside(ours(), after=moved)
