# ranks: 2
# verdict: same-order
"""The permutation is drawn anew for every epoch, from a generator that is seeded anew too."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(256, 4)
y = x[:, :1] * 2
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for _ in range(4):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    mine = order[hora.rank() :: hora.size()]
    for chosen in mine.split(16):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
