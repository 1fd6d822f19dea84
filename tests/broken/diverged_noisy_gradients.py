# ranks: 2
# verdict: diverged
"""Noise is added to the averaged gradients, and each rank draws its own."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(100 + hora.rank())
x = torch.randn(1024, 6, generator=torch.Generator().manual_seed(0))
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)

for batch, target in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    for parameter in model.parameters():
        parameter.grad += 0.01 * torch.randn_like(parameter)
    optimizer.step()
