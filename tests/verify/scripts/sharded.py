"""A sharded optimizer, clipped by the norm of the whole gradient."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(3)
x = torch.randn(96, 6)
y = x[:, :2].sin()
loader = hora.data_loader((x, y), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hora.DistributedOptimizer(optimizer, model, shard="optimizer")
hora.broadcast_parameters(model)
for inputs, targets in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
