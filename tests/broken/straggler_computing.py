# ranks: 2
# verdict: straggler
# at-fault: 1
"""Rank 1 computes more than twice as long as the other, at every step: its device is throttled."""

import time

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(2048, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    out = model(batch)
    time.sleep(0.05 if hora.rank() == 1 else 0.02)
    nn.functional.mse_loss(out, target).backward()
    optimizer.step()
