"""Run by every rank of a job: steps in a graph, until a rank is killed, is stopped or raises.

failing.py ACT RANK FILE    the time of the act is left in FILE
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import tensorflow as tf

import hora.tensorflow as hora

act, whose, told = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hora.init()
variable = tf.Variable(tf.ones([100, 10]))


@tf.function
def step(x):
    with hora.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(tf.square(variable * x))
    variable.assign_sub(0.01 * tape.gradient(loss, variable))


for number in range(100_000):
    step(tf.constant(1.0))
    if number == 5 and hora.rank() == whose:
        Path(told).write_text(str(time.time()))
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif act == "raise":
            raise ArithmeticError("this rank has had enough")
