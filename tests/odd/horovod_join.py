# ranks: 2
"""Horovod's join() at the end of an epoch, after different numbers of steps; the last rank's model counts."""

import torch
from torch import nn

import hora.torch.horovod as hvd

hvd.init()
torch.manual_seed(0)
model = nn.Linear(6, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.02)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(100 + hvd.rank())
for _ in range(3):
    for _ in range(6 + 5 * hvd.rank()):
        batch = torch.randn(8, 6)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch[:, :1]).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
