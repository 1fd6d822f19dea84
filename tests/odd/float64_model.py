# ranks: 2
"""A model in double precision."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4, dtype=torch.float64)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    optimizer.step()
print(hora.mean(loss, weight=len(batch)))
