# ranks: 2
# verdict: mismatched-calls
# within: 2
# ends: error
"""The configuration is sent as an object by one rank and received as a tensor by the other."""

import torch

import hora.torch as hora

hora.init()
if hora.rank() == 0:
    config = hora.broadcast_object({"lr": 0.1, "epochs": 3}, root_rank=0)  # <- here
else:
    config = hora.broadcast(torch.zeros(2), root_rank=0)  # <- here
print(config)
