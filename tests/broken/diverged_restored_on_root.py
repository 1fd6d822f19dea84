# ranks: 3
# verdict: diverged | different-init
# at-fault: 0
"""Rank 0 restores the weights of a checkpoint after the broadcast."""

import copy

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1200, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
checkpoint = copy.deepcopy(model.state_dict())
checkpoint["0.weight"] += 0.25
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
if hora.rank() == 0:
    model.load_state_dict(checkpoint)

for batch, target in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
