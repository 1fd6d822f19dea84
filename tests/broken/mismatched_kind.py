# ranks: 2
# verdict: mismatched-calls
# within: 2
# ends: error
"""The root broadcasts the threshold, the others average it."""

import torch

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
scores = torch.rand(100)
threshold = scores.median().reshape(1)
if scores.mean() > hora.rank():
    threshold = hora.broadcast(threshold, root_rank=0)  # <- here
else:
    threshold = hora.allreduce(threshold)  # <- here
print(threshold.item())
