"""Batch norm over each worker's own samples."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 3, 4, 4), torch.randint(0, 3, (48,))), global_batch=12)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)

for x, y in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
