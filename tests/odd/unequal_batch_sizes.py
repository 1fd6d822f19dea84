# ranks: 2
"""Rank 0 takes batches three times as large, on purpose, and the mean is weighted."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
first, second = x[:240].split(12), x[240:].split(4)
mine = first if hora.rank() == 0 else second
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch in mine:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch[:, :1])
    (loss * len(batch) / 8).backward()
    optimizer.step()
    print(hora.mean(loss, weight=len(batch)))
