# ranks: 2
"""The first step of rank 1 takes three seconds longer, as when only its compiler's cache is cold."""

import time

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(960, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for step, (batch, target) in enumerate(hora.track(loader, epochs=3)):
    if step == 0 and hora.rank() == 1:
        time.sleep(3)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    time.sleep(0.01)
    optimizer.step()
