# ranks: 3
# verdict: mismatched-calls
# at-fault: 2
"""The last rank has a shorter last batch, and gathers fewer predictions with torch.distributed."""

import torch
import torch.distributed as dist

import hora.torch as hora

hora.init()
size = 10
for step in range(4):
    predictions = torch.ones(size - (step == 3 and hora.rank() == 2))
    everyone = [torch.empty_like(predictions) for _ in range(hora.size())]
    dist.all_gather(everyone, predictions)  # <- here
