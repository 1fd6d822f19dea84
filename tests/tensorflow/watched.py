"""Run by every rank of a job: trainings that are as they should be, some with a fault that the guard tells,
and a call that ends the job.
"""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

import hora.tensorflow as hora
from hora.core.errors import VerdictError

hora.init()
rank = hora.rank()
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)


def steps_of(weights, bias, *, in_graph):
    def step(x, y):
        with hora.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(x @ weights + bias - y))
        for variable, gradient in zip((weights, bias), tape.gradient(loss, (weights, bias)), strict=True):
            variable.assign_sub(0.01 * gradient)

    return tf.function(step) if in_graph else step


def trained(batches, *, in_graph, after=lambda number, weights, bias: None):
    weights, bias = tf.Variable(tf.ones([4, 1]), name="weights"), tf.Variable(tf.zeros([1]), name="bias")
    step = steps_of(weights, bias, in_graph=in_graph)
    for number, batch in enumerate(batches):
        step(*batch)
        after(number, weights, bias)


def ours():
    return hora.data_loader((x, y), global_batch=8)


def spoilt(batches):
    for number, (images, targets) in enumerate(batches):
        yield images * (np.nan if (number, rank) == (4, 1) else 1), targets


def moved(number, weights, bias):
    if number == 2:
        bias.assign_add([0.1 * rank])


for in_graph in (False, True):
    trained(ours(), in_graph=in_graph)
print(f"all was right at {time.time()}", flush=True)
trained(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), in_graph=True)
trained(spoilt(ours()), in_graph=True)
trained(ours(), in_graph=True, after=moved)


@tf.function
def mismatched(tensor):
    return hora.allreduce(tensor)


try:
    mismatched(tf.ones([2 + rank]))
except VerdictError as error:
    print(f"rank {rank} got {error.kind}: {error}", flush=True)
    raise
