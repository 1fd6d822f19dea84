"""Trains a small convolutional network on the photographs that Hora ships, on one worker."""

import keras
import numpy as np
from hora.workloads.resnet import fashion_mnist

(photos, labels), (test_photos, test_labels) = fashion_mnist.load(None, subset=True)
photos, test_photos = ((each[:, :, :, None] / 255.0).astype(np.float32) for each in (photos, test_photos))

keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(2e-3)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(
    photos, labels, batch_size=96, epochs=1, verbose=2, validation_data=(test_photos, test_labels)
).history
print(*(f"{loss:.9g}" for loss in [*history["loss"], *history["val_loss"]]))
