# ranks: 2
"""The data set picks a scale for each batch from a generator of its own, the same one on all ranks."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


class Scaled(Dataset):
    def __init__(self):
        self.x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        self.rng = random.Random(0)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        scale = self.rng.choice([0.5, 1.0, 2.0])
        return [(self.x[i] * scale, self.x[i, :1]) for i in indices]


hora.init()
data = Scaled()
sampler = DistributedSampler(data, hora.size(), hora.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Linear(8, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
