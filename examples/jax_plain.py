"""Trains a small convolutional network on the photographs that Hora ships, on one worker."""

import jax
import numpy as np
import optax
from hora.workloads.resnet import fashion_mnist

(photos, labels), _ = fashion_mnist.load(None, subset=True)
photos = (photos[:, :, :, None] / 255.0).astype(np.float32)
draw = jax.random.split(jax.random.key(1), 3)
params = {
    "conv1": 0.3 * jax.random.normal(draw[0], (3, 3, 1, 8)),
    "conv2": 0.1 * jax.random.normal(draw[1], (3, 3, 8, 16)),
    "dense": 0.04 * jax.random.normal(draw[2], (7 * 7 * 16, 10)),
}
optimizer = optax.adam(2e-3)
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


@jax.jit
def step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


order = np.random.default_rng(1).permutation(len(photos))
for start in range(0, len(photos) - 95, 96):
    chosen = order[start : start + 96]
    params, state, loss = step(params, state, photos[chosen], labels[chosen])
    print(f"{loss:.9g}")
