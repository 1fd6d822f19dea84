"""Trains and commits; `elastic.py RANK OUT` kills RANK (-1: none) at the first attempt's seventh step."""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hora.jax as hora

hora.init()
victim, out = int(sys.argv[1]), sys.argv[2]
first = os.environ.get("HORA_ATTEMPT", "1") == "1"
random = np.random.default_rng(3)
inputs = random.normal(size=(48, 4)).astype(np.float32)
truth = np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
optimizer = hora.DistributedOptimizer(optax.adam(0.05))


@hora.spmd(split=("x", "y"))
def step(params, state, x, y):
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


params = {"b": np.zeros(1, np.float32), "w": np.zeros((4, 1), np.float32)}
loader = hora.data_loader((inputs, inputs @ truth), global_batch=12, seed=5)
state = hora.elastic.JaxState(params=params, opt_state=optimizer.init(params), loader=loader, step=0)


@hora.elastic.run
def train(state):
    while loader.epoch < 4:
        for x, y in loader:
            if first and state.step == 6 and hora.rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            state.params, state.opt_state = step(state.params, state.opt_state, x, y)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        print(f"rank {hora.rank()}: epoch {loader.epoch}, step {state.step}", flush=True)


train(state)
if hora.rank() == 0:
    np.savez(out, step=state.step, **hora.local(state.params))
