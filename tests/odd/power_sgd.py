# ranks: 2
"""Gradients travel as two narrow factors, and what they miss stays on the rank."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 32)
loader = hora.data_loader((x, x[:, :4]), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), model, compression=hora.PowerSGD(rank=2)
)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
