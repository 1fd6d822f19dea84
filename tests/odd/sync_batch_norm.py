# ranks: 3
"""Batch norm over the global batch, so that its statistics are equal too; the tail is uneven."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(250, 6) * 2 + 1
y = (x[:, 0] > 1).long()
loader = hora.data_loader((x, y), global_batch=24, seed=1, tail="uneven")
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
model = hora.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), label, reduction="sum") / loader.samples_per_worker
    loss.backward()
    optimizer.step()
