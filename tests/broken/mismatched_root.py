# ranks: 2
# verdict: mismatched-calls
# call: broadcast
# within: 2
# ends: error
"""Each rank broadcasts from itself."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
model = nn.Linear(3, 3)
weights = hora.broadcast(model.weight.detach(), root_rank=hora.rank())  # <- here
with torch.no_grad():
    model.weight.copy_(weights)
