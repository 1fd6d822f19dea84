# ranks: 2
# verdict: same-data
"""A long stream that does not know of ranks, with a loader made in the line of the loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hora.torch as hora


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        for _ in range(256):
            sample = torch.randn(5, generator=generator)
            yield sample, sample.sum(0, keepdim=True)


hora.init()
model = nn.Linear(5, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for sample, target in DataLoader(Stream(), batch_size=16):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(sample), target).backward()
    optimizer.step()
