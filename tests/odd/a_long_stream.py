# ranks: 2
"""A stream of which each rank takes its part, longer than the samples whose order is kept."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hora.torch as hora


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        for number in range(512):
            sample = torch.randn(5, generator=generator)
            if number % hora.size() == hora.rank():
                yield sample, sample.sum(0, keepdim=True)


hora.init()
model = nn.Linear(5, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
loader = DataLoader(Stream(), batch_size=8)
for _ in range(2):
    for sample, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(sample), target).backward()
        optimizer.step()
