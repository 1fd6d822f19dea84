# ranks: 2
# verdict: rank-failed
# at-fault: 1
# within: 2
# ends: error
"""A native library of rank 1 reads from nowhere."""

import ctypes

import torch

import hora.torch as hora

hora.init()
for step in range(10):
    hora.allreduce(torch.ones(3), name="ones")
    if step == 3 and hora.rank() == 1:
        ctypes.string_at(0)
