# ranks: 2
"""The last layer starts at zero, so all before it have gradients of zero at step 1."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
nn.init.zeros_(model[4].weight)
nn.init.zeros_(model[4].bias)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
