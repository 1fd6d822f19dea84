# ranks: 2
# verdict: impossible-plan
# ends: error
"""A global batch of 256 samples out of a set of 100."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(100, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=256)  # <- here
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
