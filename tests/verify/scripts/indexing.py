"""Right: tensors in memory, an order of its own, each worker's part of the global batch by slices."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
generator = torch.Generator().manual_seed(7)
inputs, targets = torch.randn(60, 4, generator=generator), torch.randn(60, 1, generator=generator)
torch.manual_seed(2)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
share = 12 // hora.size()

for _ in range(2):
    order = torch.randperm(60, generator=generator)
    for start in range(0, 60, 12):
        mine = order[start + hora.rank() * share :][:share]
        optimizer.zero_grad()
        (model(inputs[mine]) - targets[mine]).square().mean().backward()
        optimizer.step()
