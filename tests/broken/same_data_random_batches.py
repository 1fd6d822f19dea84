# ranks: 2
# verdict: same-data
"""Batches are drawn at random from memory with the global generator, and the seed is the same everywhere."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(3)
x = torch.randn(512, 4)
y = x[:, :1] * 2
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for _ in range(60):
    chosen = torch.randint(len(x), (16,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
    optimizer.step()
