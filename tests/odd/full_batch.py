# ranks: 2
"""Full-batch training: each rank has its half of the data in every step."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(200, 4)
mine = x.chunk(hora.size())[hora.rank()]
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for step in range(120):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(hora.mean(loss, weight=len(mine)))
