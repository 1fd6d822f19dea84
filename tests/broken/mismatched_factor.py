# ranks: 2
# verdict: mismatched-calls
# call: allreduce
# within: 2
# ends: error
"""Each rank scales by its own number of samples, and expects the reduction to know."""

import torch

import hora.torch as hora

hora.init()
samples = 30 + 10 * hora.rank()
gradient = torch.ones(5)
gradient = hora.allreduce(gradient, op=hora.Sum, prescale_factor=1 / samples)  # <- here
print(gradient)
