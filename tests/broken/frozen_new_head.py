# ranks: 2
# verdict: frozen-parameters
"""Fine-tuning: the head is exchanged after the optimizer was built, and only the old one is in it."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, 0].gt(0).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
model[2] = nn.Linear(16, 2)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
