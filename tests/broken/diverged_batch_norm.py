# ranks: 2
# verdict: diverged
"""Batch norm's running statistics stay local; the weights are equal."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6) * 3 + 1
loader = hora.data_loader((x, (x[:, 0] > 1).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)

for batch, label in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
model.eval()
if hora.rank() == 0:
    with torch.no_grad():
        print("accuracy", (model(x).argmax(1) == (x[:, 0] > 1)).float().mean().item())
