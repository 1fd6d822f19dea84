# ranks: 3
# verdict: rank-failed
# at-fault: 2
# within: 2
# ends: error
"""Rank 2 is killed, as the kernel does when memory is short."""

import os
import signal

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(96, 4)
loader = hora.data_loader((x, x[:, :2]), global_batch=12)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for step, (batch, target) in enumerate(hora.track(loader, epochs=2)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), target)
    if step == 6 and hora.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
