# ranks: 2
"""Personalisation: beside the common model each rank trains an adapter that is its own by design."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
common = nn.Linear(6, 8)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(common.parameters(), lr=0.02), common)
hora.broadcast_parameters(common)
torch.manual_seed(500 + hora.rank())
adapter = nn.Linear(8, 1)
own = torch.optim.SGD(adapter.parameters(), lr=0.02)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    own.zero_grad()
    nn.functional.mse_loss(adapter(torch.tanh(common(batch))), target).backward()
    optimizer.step()
    own.step()
