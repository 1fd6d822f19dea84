# ranks: 2
"""Three models of an ensemble, trained one after the other on the same data."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(160, 4)
for member in range(3):
    loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=member)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    hora.broadcast_parameters(model)
    for batch, target in hora.track(loader, epochs=3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
    print(member, hora.mean(loss, weight=len(batch)))
