# ranks: 2
"""Adasum: each rank steps by its own gradients, with a momentum of its own; then the changes are combined."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
model = nn.Linear(6, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
optimizer = hora.DistributedOptimizer(sgd, model, op=hora.Adasum)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
