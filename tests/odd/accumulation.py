# ranks: 2
"""Gradients of four micro-batches make one step; the last window of an epoch is short."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(144, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=8, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), model, backward_passes_per_step=4
)
hora.broadcast_parameters(model)
for _ in range(3):
    optimizer.zero_grad()
    for i, (batch, target) in enumerate(loader, 1):
        nn.functional.mse_loss(model(batch), target).backward()
        if i % 4 == 0 or i == len(loader):
            optimizer.step()
            optimizer.zero_grad()
