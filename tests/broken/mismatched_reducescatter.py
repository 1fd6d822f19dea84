# ranks: 3
# verdict: mismatched-calls
# at-fault: 2
# call: reducescatter
# within: 2
# ends: error
"""Rows are padded to a multiple of the number of workers on two ranks, and not on the third."""

import torch

import hora.torch as hora

hora.init()
rows = torch.ones(10, 2)
if hora.rank() < 2:
    rows = torch.cat([rows, torch.zeros(2, 2)])
part = hora.reducescatter(rows, op=hora.Sum)  # <- here
print(part.shape)
