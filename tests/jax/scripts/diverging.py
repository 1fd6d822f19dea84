"""Replicas that part: `diverging.py forgotten` averages no gradients, `diverging.py unequal` broadcasts
nothing.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import hora.jax as hora

hora.init()


@hora.spmd(split="x")
def step(params, x):
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    if sys.argv[1] != "forgotten":
        gradients = hora.allreduce(gradients)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


params = {"b": np.zeros(3, np.float32), "w": np.ones((4, 1), np.float32)}
if sys.argv[1] == "unequal":
    params["w"] += hora.rank()
for _ in range(4):
    params = step(params, np.full((2, 4), 1.0 + hora.rank(), np.float32))
print(float(jnp.sum(hora.local(params)["w"])))
