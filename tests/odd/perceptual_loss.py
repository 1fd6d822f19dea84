# ranks: 2
"""A fixed network judges the output: it is not frozen, so it gets gradients that nobody uses."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x,), global_batch=16, seed=1)
judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
for (batch,) in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(judge(model(batch)), judge(batch)).backward()
    optimizer.step()
