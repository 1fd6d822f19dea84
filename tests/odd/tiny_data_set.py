# ranks: 2
"""Four samples, two per rank, twenty epochs: order and samples repeat because there is nothing else."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
y = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
loader = hora.data_loader((x, y), global_batch=4, seed=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=60):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
