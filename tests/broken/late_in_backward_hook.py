# ranks: 2
# verdict: late-rank
# at-fault: 1
# options: --stall-after 1
# ends: ok
"""A hook on a gradient of rank 1 writes histograms to a slow disk during backward."""

import time

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(64, 4)
loader = hora.data_loader((x, x[:, :1]), global_batch=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)


def write(gradient):
    seen.append(gradient.norm())
    if hora.rank() == 1 and len(seen) == 4:
        time.sleep(3)  # <- here


seen = []
model[0].weight.register_hook(write)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
