# ranks: 2
# verdict: impossible-plan
# ends: error
"""Sixteen backward passes per step, and an epoch has four of them."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(64, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model, backward_passes_per_step=16
)
hora.broadcast_parameters(model)
for epoch in range(2):
    for i, (batch, target) in enumerate(loader):
        nn.functional.mse_loss(model(batch), target).backward()
        if (i + 1) % 16 == 0:
            optimizer.step()
            optimizer.zero_grad()
    print("epoch", epoch)
