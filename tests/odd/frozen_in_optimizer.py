# ranks: 2
"""Frozen parameters are in the optimizer all the same, and are unfrozen later."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
model[0].requires_grad_(False)
for epoch in range(4):
    if epoch == 2:
        model[0].requires_grad_(True)
    for batch, label in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
