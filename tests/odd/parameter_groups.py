# ranks: 2
"""Several parameter groups, one of them with a learning rate of zero for now."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
groups = [
    {"params": model[0].parameters(), "lr": 0.0},
    {"params": model[2].parameters(), "lr": 0.01, "weight_decay": 0.01},
    {"params": model[4].parameters()},
]
optimizer = hora.DistributedOptimizer(torch.optim.SGD(groups, lr=0.05, momentum=0.9), model)
hora.broadcast_parameters(model)
for epoch in range(4):
    if epoch == 2:
        optimizer.param_groups[0]["lr"] = 0.01
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
