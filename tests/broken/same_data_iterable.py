# ranks: 2
# verdict: same-data
"""A stream of samples that does not know of ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hora.torch as hora


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        for _ in range(320):
            sample = torch.randn(5, generator=generator)
            yield sample, sample.sum(0, keepdim=True)


hora.init()
model = nn.Linear(5, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for sample, target in hora.track(DataLoader(Stream(), batch_size=8), epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(sample), target).backward()
    optimizer.step()
