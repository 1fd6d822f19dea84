"""Trains a small convolutional network on the photographs that Hora ships, on one worker."""

import numpy as np
import tensorflow as tf
from hora.workloads.resnet import fashion_mnist

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


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(photos))
    for start in range(0, len(photos) - 95, 96):
        chosen = order[start : start + 96]
        loss = step(photos[chosen], labels[chosen])
        print(f"{loss:.9g}")
