"""A loop over a ``tf.function``: ``train.py [FAULT...]`` trains rightly, or with faults."""

import sys

import keras
import numpy as np
import tensorflow as tf

import hora.tensorflow as hora

faults = set(sys.argv[1:])
hora.init()
rank, size = hora.rank(), hora.size()
rng = np.random.default_rng(1)
x, y = rng.normal(size=(48, 5)).astype(np.float32), rng.integers(0, 3, 48)
keras.utils.set_random_seed(1 + ("not-broadcast" in faults) * rank)
layers = [keras.Input((5,)), keras.layers.Dense(6, activation="tanh")]
if "batch-norm" in faults:
    layers.append(keras.layers.BatchNormalization())
if "sync-batch-norm" in faults:
    layers.append(hora.SyncBatchNormalization())
model = keras.Sequential([*layers, keras.layers.Dense(3)])
if "not-broadcast" not in faults:
    hora.broadcast_variables(model.variables)
optimizer = keras.optimizers.SGD(0.05 * (size if "rate" in faults else 1), momentum=0.9)
if "optimizer" in faults or "clipped" in faults or "by-hand" in faults:
    optimizer = hora.DistributedOptimizer(optimizer)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        if "noise" in faults:
            x = x + 0.1 * tf.random.normal(tf.shape(x))
        hidden = tf.nn.dropout(x, 0.4) if "dropout" in faults else x
        loss = loss_of(y, model(hidden, training=True))
    if not faults & {"optimizer", "never-averaged", "clipped", "by-hand"}:
        tape = hora.DistributedGradientTape(tape, op=hora.Sum if "summed" in faults else hora.Average)
    gradients = tape.gradient(loss, model.trainable_variables)
    if "clipped" in faults:
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
    if "by-hand" in faults:
        gradients = [gradient * 0.1 / tf.norm(gradient) for gradient in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def batches():
    if "same-data" in faults:
        order = np.arange(48)
    elif "own-order" in faults:
        order = np.random.default_rng(rank + size).permutation(48)
    elif "unequal" in faults and size > 1:
        for first in range(0, 48, 12):
            share = slice(first, first + 9) if rank == 0 else slice(first + 9, first + 12)
            yield x[share], y[share]
        return
    elif "batch-per-worker" in faults:
        order = np.arange(rank, 48, size)
    elif "data-set" in faults:
        data = tf.data.Dataset.from_tensor_slices((x, y))
        yield from hora.shard(data, global_batch=12)
        return
    elif "unequal" in faults:
        order = np.arange(48)
    else:
        yield from hora.data_loader((x, y), global_batch=12, seed=1)
        return
    for first in range(0, len(order), 12):
        yield x[order[first : first + 12]], y[order[first : first + 12]]


for _ in range(2):
    for batch in batches():
        loss = step(*batch)
        if "mean-of-means" in faults:
            hora.allreduce(loss)
