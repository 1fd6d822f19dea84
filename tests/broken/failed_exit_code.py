# ranks: 2
# verdict: rank-failed
# at-fault: 1
# within: 2
# ends: error
"""Rank 1 finds its disk full and leaves with an exit code of its own."""

import sys

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(64, 2)
loader = hora.data_loader((x, x.prod(1, keepdim=True)), global_batch=8)
model = nn.Linear(2, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for step, (batch, target) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    if step == 4 and hora.rank() == 1:
        print("no space left, giving up")
        sys.exit(3)
