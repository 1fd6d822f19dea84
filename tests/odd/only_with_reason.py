# ranks: 2
# options: --stall-after 1
"""A long evaluation on rank 0, declared."""

import time

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(120, 4)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=12, seed=1)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for epoch in range(2):
    for batch, label in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    if epoch == 0:
        with hora.only(0, reason="evaluation") as mine:
            if mine:
                time.sleep(2.5)
