# ranks: 3
"""Rank 0 keeps a log, rank 1 a histogram, rank 2 nothing; only the training is common."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(240, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
log, histogram = [], torch.zeros(10)
for batch, target in hora.track(loader, epochs=3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    optimizer.step()
    if hora.rank() == 0:
        log.append(f"{loss:.4f}")
    elif hora.rank() == 1:
        histogram += torch.histc(model[0].weight.detach(), 10, -1, 1)
print(len(log), histogram.sum().item())
