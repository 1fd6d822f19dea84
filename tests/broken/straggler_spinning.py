# ranks: 2
# verdict: straggler
# at-fault: 0
"""Rank 0 renders a picture of its batch at every step."""

import time

import torch
from torch import nn

import hora.torch as hora


def render(batch):
    until = time.perf_counter() + 0.03
    pixels = 0
    while time.perf_counter() < until:
        pixels += int(batch.sum() > pixels)
    return pixels


hora.init()
torch.manual_seed(1)
x = torch.randn(2560, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    if hora.rank() == 0:
        render(batch)
