# ranks: 2
"""All ranks draw the same permutation from the global generator, and each takes its part of it."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(7)
x = torch.randn(256, 4)
y = x[:, :1] * 2
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for _ in range(4):
    order = torch.randperm(len(x))
    for chosen in order[hora.rank() :: hora.size()].split(16):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
