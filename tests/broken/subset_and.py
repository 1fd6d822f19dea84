# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: allreduce
# within: 2
# ends: error
"""A short form of `if rank == 0`, with a reduction in the part that is not always evaluated."""

import torch

import hora.torch as hora

hora.init()
values = torch.arange(8.0) + hora.rank()
for step in range(5):
    values = hora.allreduce(values * 1.5, name="values")
    hora.rank() == 0 and print(step, hora.allreduce(values.norm(), name="norm"))  # <- here
