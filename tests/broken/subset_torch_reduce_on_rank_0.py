# ranks: 2
# verdict: subset-call
# at-fault: 0
"""A metric is reduced with torch.distributed itself, where only rank 0 prints it."""

import torch
import torch.distributed as dist

import hora.torch as hora

hora.init()
for step in range(8):
    loss = torch.tensor(float(step + hora.rank()))
    if hora.rank() == 0 and step == 5:
        dist.all_reduce(loss)  # <- here
        print(f"loss {loss.item()}")
dist.barrier()
