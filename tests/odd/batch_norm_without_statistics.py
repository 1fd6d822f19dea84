# ranks: 2
"""Batch norm without running statistics: it uses those of the batch, always."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(64, 6)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=32, seed=1)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=40):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
