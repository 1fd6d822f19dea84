"""Trains and commits; `elastic.py RANK OUT` kills RANK (-1: none) at the first attempt's seventh step."""

import os
import signal
import sys

import numpy as np
import tensorflow as tf

import hora.tensorflow as hora

hora.init()
victim, out = int(sys.argv[1]), sys.argv[2]
first = os.environ.get("HORA_ATTEMPT", "1") == "1"
random = np.random.default_rng(3)
inputs = random.normal(size=(12, 4)).astype(np.float32)
targets = inputs @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
weights = [
    tf.Variable(tf.zeros((4, 1))),
    tf.Variable(tf.zeros(1)),
    tf.Variable(tf.zeros((4, 1))),
]  # the last: momentum
state = hora.elastic.TensorFlowState(weights, step=0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(state.step)])


@tf.function
def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weights[0] + weights[1] - y) ** 2)
    return hora.DistributedGradientTape(tape).gradient(loss, weights[:2])


@hora.elastic.run
def train(state: hora.elastic.TensorFlowState) -> None:
    while state.step < 16:
        if first and state.step == 6 and hora.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        share = 12 // hora.size()
        mine = np.roll(np.arange(12), state.step)[hora.rank() * share :][:share]
        slope, bias = gradients(tf.constant(inputs[mine]), tf.constant(targets[mine]))
        weights[2].assign(0.9 * weights[2] + slope)
        weights[0].assign_sub(0.05 * weights[2])
        weights[1].assign_sub(0.05 * bias)
        state.step += 1
        if state.step % 2 == 0:
            state.commit()


train(state)
assert resets == ([] if first else [6]), resets  # the last commit before the seventh step
if hora.rank() == 0:
    np.savez(out, step=state.step, **{str(i): weight.numpy() for i, weight in enumerate(weights)})
