# ranks: 2
"""Only a new head is trained, and nobody has frozen the rest: it gets gradients that are not used."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.01), model[2])
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
