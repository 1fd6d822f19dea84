# ranks: 2
"""Fine-tuning: the backbone does not require gradients and is not in the optimizer."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
model[0].requires_grad_(False)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
