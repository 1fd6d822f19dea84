# ranks: 3
# verdict: late-rank
# at-fault: 2
# options: --stall-after 1 --stall-abort 3
# ends: hang
"""Rank 2 is stopped in the midst of training, as by a debugger or a scheduler that suspends it."""

import os
import signal

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(240, 6)
loader = hora.data_loader((x, x.mean(1, keepdim=True)), global_batch=12, seed=5)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for step, (batch, target) in enumerate(hora.track(loader, epochs=2)):
    if step == 7 and hora.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
