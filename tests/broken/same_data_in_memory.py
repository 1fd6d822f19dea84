# ranks: 2
# verdict: same-data
"""Batches are cut out of a tensor by position, and the position does not depend on the rank."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
images = torch.randn(512, 1, 6, 6)
labels = images.mean((1, 2, 3)).gt(0).long()
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for start in range(0, len(images), 16):
    batch, label = images[start : start + 16], labels[start : start + 16]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
