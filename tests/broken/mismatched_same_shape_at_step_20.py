# ranks: 2
# verdict: mismatched-calls
# after: step 19
# within: 2
# ends: error
"""At step 20 a maximum meets a mean of the same shape; both were called before, so sizes do not tell."""

import time

import torch

import hora.torch as hora


def peak(values):
    return hora.allreduce(values.max().reshape(1), op=hora.Max)  # <- here


def average(values):
    return hora.allreduce(values.mean().reshape(1))  # <- here


hora.init()
torch.manual_seed(hora.rank())
for step in range(300):
    values = torch.rand(64)
    first, second = (average, peak) if step < 20 or hora.rank() == 0 else (peak, average)
    first(values)
    second(values)
    time.sleep(0.01)
    print(f"step {step}")
