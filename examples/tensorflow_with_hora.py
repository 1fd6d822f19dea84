"""Trains the same network on any number of workers: `hora run -n 2 examples/tensorflow_with_hora.py`."""

import numpy as np
import tensorflow as tf
import hora.tensorflow as hora
from hora.workloads.resnet import fashion_mnist

hora.init()
(photos, labels), _ = fashion_mnist.load(None, subset=True)
photos = (photos[:, :, :, None] / 255.0).astype(np.float32)
tf.keras.utils.set_random_seed(1)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((28, 28, 1)),
        tf.keras.layers.Conv2D(8, 3, 2, activation="relu"),
        tf.keras.layers.Conv2D(16, 3, 2, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
optimizer = tf.keras.optimizers.Adam(2e-3)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
hora.broadcast_variables(model.variables)


@tf.function
def step(x, y):
    with hora.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


loader = hora.data_loader((photos, labels), global_batch=96, seed=1)
for _ in range(2):
    for x, y in loader:
        loss = hora.mean(step(x, y), weight=len(x))
        if hora.rank() == 0:
            print(f"{loss:.9g}")
