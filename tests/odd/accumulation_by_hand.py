# ranks: 2
"""Accumulation as in plain torch, without telling anyone."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(160, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=8, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for i, (batch, target) in enumerate(hora.track(loader, epochs=3), 1):
    (nn.functional.mse_loss(model(batch), target) / 2).backward()
    if i % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
