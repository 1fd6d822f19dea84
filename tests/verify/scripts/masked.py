"""A mean that the script makes itself, by a mask: each worker divides by its own number of tokens."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
inputs, targets = torch.randn(48, 7, 3), torch.randn(48, 7)
masks = (torch.arange(7) < torch.randint(2, 8, (48, 1))).float()
loader = hora.data_loader((inputs, targets, masks), global_batch=12)
model = nn.Linear(3, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for x, y, mask in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    errors = (model(x).squeeze(2) - y).square()
    ((errors * mask).sum() / mask.sum()).backward()
    optimizer.step()
