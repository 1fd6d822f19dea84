"""Trains the same network on any number of workers: `hora run -n 2 examples/keras_with_hora.py`."""

import keras
import numpy as np
import hora.keras as hora
from hora.workloads.resnet import fashion_mnist

hora.init()
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
optimizer = hora.DistributedOptimizer(keras.optimizers.Adam(2e-3))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
data = hora.data_loader(photos, labels, global_batch=96, seed=1)
test_data = hora.data_loader(test_photos, test_labels, global_batch=96, shuffle=False, tail="uneven")
callbacks = [hora.callbacks.BroadcastGlobalVariablesCallback(), hora.callbacks.MetricAverageCallback()]
history = model.fit(data, epochs=1, verbose=2, validation_data=test_data, callbacks=callbacks).history
if hora.rank() == 0:
    print(*(f"{loss:.9g}" for loss in [*history["loss"], *history["val_loss"]]))
