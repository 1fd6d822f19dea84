"""Trains until a rank is told to fail in one of several ways: `failing.py HOW RANK`."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hora.jax as hora

hora.init()

how, who = sys.argv[1], int(sys.argv[2])
optimizer = hora.DistributedOptimizer(optax.sgd(0.1))


@hora.spmd(split="x")
def step(params, state, x):
    gradients = jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, hora.allreduce(jnp.mean(x))


params = hora.broadcast_parameters(np.ones((4, 1), np.float32))
state = optimizer.init(params)
for number in range(100_000):
    if number == 5:
        print(f"training {time.time()}", flush=True)
        if hora.rank() == who:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "raise":
                raise ArithmeticError("this rank had enough")
            elif how == "exit":
                sys.exit(7)
            elif how == "shape":
                hora.allreduce(np.ones(3))
        elif how == "shape":
            hora.allreduce(np.ones(4))
    rows = 3 if how == "batch" and number == 5 and hora.rank() == who else 2
    params, state, loss = step(params, state, np.full((rows, 4), 0.1, np.float32))
    if number % 10 == 0:
        float(loss)
