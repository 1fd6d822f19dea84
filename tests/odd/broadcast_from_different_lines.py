# ranks: 2
"""The root and the others call the same broadcast from different lines."""

import torch

import hora.torch as hora

hora.init()
for step in range(6):
    if hora.rank() == 0:
        plan = hora.broadcast(torch.arange(4.0) + step, root_rank=0)
    else:
        plan = hora.broadcast(torch.zeros(4), root_rank=0)
    assert plan[0] == step
if hora.rank() == 0:
    settings = hora.broadcast_object({"lr": 0.1}, root_rank=0)
else:
    settings = hora.broadcast_object(None, root_rank=0)
print(settings)
