"""Each worker draws its batch from all samples, in an order of its own."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(5)
inputs, targets = torch.randn(48, 4), torch.randn(48, 1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
generator = torch.Generator().manual_seed(hora.rank())

for _ in range(8):
    index = torch.randint(0, 48, (12 // hora.size(),), generator=generator)
    optimizer.zero_grad()
    (model(inputs[index]) - targets[index]).square().mean().backward()
    optimizer.step()
