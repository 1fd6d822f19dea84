# ranks: 2
"""The global gradient is clipped between backward and step."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 8)
loader = hora.data_loader((x, x[:, :4] * 20), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(float(norm))
