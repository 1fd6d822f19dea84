# ranks: 2
# verdict: not-finite
# at-fault: 0
"""An exponential overflows on one outlier of rank 0."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(256, 4)
x[34] = 400.0
loader = hora.data_loader((x,), global_batch=16, shuffle=False)
model = nn.Linear(4, 1)
nn.init.constant_(model.weight, 0.1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
hora.broadcast_parameters(model)
for (batch,) in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    rate = torch.exp(model(batch))
    (rate - model(batch)).mean().backward()  # <- here
    optimizer.step()
