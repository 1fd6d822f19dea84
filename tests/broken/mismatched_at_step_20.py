# ranks: 2
# verdict: mismatched-calls
# call: allreduce
# after: step 19
# within: 2
# ends: error
"""At step 20 rank 1 makes two calls, both well known by then, the other way round."""

import time

import torch

import hora.torch as hora


def log_loss(value):
    return hora.allreduce(value.reshape(1), name="loss")  # <- here


def log_histogram(values):
    return hora.allreduce(torch.histc(values, 8, -3, 3), name="histogram", op=hora.Sum)  # <- here


hora.init()
torch.manual_seed(hora.rank())
for step in range(300):
    values = torch.randn(32)
    if step == 20 and hora.rank() == 1:
        log_histogram(values)
        log_loss(values.square().mean())
    else:
        log_loss(values.square().mean())
        log_histogram(values)
    time.sleep(0.01)
    print(f"step {step}")
