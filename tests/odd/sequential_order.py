# ranks: 2
"""Time series in their own order, every epoch alike, on purpose."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.sin(torch.linspace(0, 60, 1001))
windows = x.unfold(0, 9, 1)
loader = hora.data_loader((windows[:, :8], windows[:, 8:]), global_batch=32, shuffle=False)
model = nn.Linear(8, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
