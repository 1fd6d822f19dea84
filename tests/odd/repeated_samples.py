# ranks: 2
"""Rare classes are drawn several times, so ranks share samples now and then."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(200, 4)
y = (x[:, 0] > 1.5).long()
dataset = TensorDataset(x, y)
weights = torch.where(y == 1, 10.0, 1.0)
generator = torch.Generator().manual_seed(31 + hora.rank())
sampler = WeightedRandomSampler(weights, 160, generator=generator)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
