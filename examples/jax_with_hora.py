"""Trains the same network on any number of workers: `hora run -n 2 examples/jax_with_hora.py`."""

import jax
import numpy as np
import optax
import hora.jax as hora
from hora.workloads.resnet import fashion_mnist

hora.init()
(photos, labels), _ = fashion_mnist.load(None, subset=True)
photos = (photos[:, :, :, None] / 255.0).astype(np.float32)
draw = jax.random.split(jax.random.key(1), 3)
params = {
    "conv1": 0.3 * jax.random.normal(draw[0], (3, 3, 1, 8)),
    "conv2": 0.1 * jax.random.normal(draw[1], (3, 3, 8, 16)),
    "dense": 0.04 * jax.random.normal(draw[2], (7 * 7 * 16, 10)),
}
params = hora.broadcast_parameters(params)
optimizer = hora.DistributedOptimizer(optax.adam(2e-3))
state = optimizer.init(params)


def loss_of(params, x, y):
    for name in ("conv1", "conv2"):
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    logits = x.reshape(len(x), -1) @ params["dense"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@hora.spmd(split=("x", "y"))
def step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, hora.allreduce(loss)


loader = hora.data_loader((photos, labels), global_batch=96, seed=1)
for x, y in loader:
    params, state, loss = step(params, state, x, y)
    if hora.rank() == 0:
        print(f"{loss:.9g}")
