# ranks: 2
# verdict: frozen-parameters
"""The optimizer was built on a copy of the model, so the model that is trained never moves."""

import copy

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
template = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(template.parameters()), template)
hora.broadcast_parameters(template)
model = copy.deepcopy(template).to(hora.device())
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
