# ranks: 3
# verdict: diverged
# at-fault: 0
"""Rank 0 evaluates with averaged weights and forgets to put the trained ones back."""

import copy

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(600, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
hora.broadcast_parameters(model)
average = copy.deepcopy(model)
for epoch in range(4):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.05)
    if epoch == 0 and hora.rank() == 0:
        model.load_state_dict(average.state_dict())
        print("evaluated", nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item())
