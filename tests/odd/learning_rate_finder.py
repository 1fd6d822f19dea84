# ranks: 2
"""A learning-rate finder runs first, on a copy of the state, and puts everything back."""

import copy

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
y = x[:, :1] * 2
loader = hora.data_loader((x, y), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
hora.broadcast_parameters(model)


def step(batch, target):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    optimizer.step()
    return hora.mean(loss, weight=len(batch))


weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
losses = []
for batch, target in loader:
    optimizer.param_groups[0]["lr"] *= 1.5
    losses.append((step(batch, target), optimizer.param_groups[0]["lr"]))
model.load_state_dict(weights)
optimizer.load_state_dict(state)
optimizer.param_groups[0]["lr"] = min(losses)[1] / 10
for batch, target in hora.track(loader, epochs=5):
    step(batch, target)
