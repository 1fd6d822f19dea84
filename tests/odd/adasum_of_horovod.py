# ranks: 2
"""The same in Horovod's form, where the changes are combined after the optimizer's own step."""

import torch
from torch import nn

import hora.torch.horovod as hvd

hvd.init()
torch.manual_seed(0)
model = nn.Linear(6, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), op=hvd.Adasum)
torch.manual_seed(100 + hvd.rank())
for _ in range(40):
    batch = torch.randn(8, 6)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), batch[:, :1]).backward()
    optimizer.step()
