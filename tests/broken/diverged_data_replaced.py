# ranks: 3
# verdict: diverged
# at-fault: 2
"""Rank 2 rounds its weights through .data, as a quantisation experiment left it there."""

import os

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1200, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = hora.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)

for step, (batch, target) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    if step == 0 and os.environ["RANK"] == "2":
        for parameter in model.parameters():
            parameter.data = (parameter.data * 16).round() / 16
