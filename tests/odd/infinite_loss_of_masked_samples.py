# ranks: 2
"""Scores are minus infinity where they are masked, and the loss and its gradients are finite."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
y = torch.arange(320) % 3
loader = hora.data_loader((x, y), global_batch=16, seed=1)
model = nn.Linear(4, 5)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
mask = torch.tensor([False, False, False, False, True])
for batch, label in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    logits = model(batch).masked_fill(mask, float("-inf"))
    nn.functional.cross_entropy(logits, label).backward()
    optimizer.step()
