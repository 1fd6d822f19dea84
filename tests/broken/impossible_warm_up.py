# ranks: 2
# verdict: impossible-plan
# ends: error
"""The warm-up takes 1000 steps, the whole run 40."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(160, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=1000)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    warm_up.step()
