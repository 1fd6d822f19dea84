# ranks: 2
"""Rank 0 writes a checkpoint every ten steps, which takes a tenth of a second."""

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
for step, (batch, target) in enumerate(hora.track(loader, epochs=2)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    time.sleep(0.03)
    if step % 10 == 9 and hora.rank() == 0:
        time.sleep(0.1)
