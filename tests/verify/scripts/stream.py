"""A stream of samples that is dealt out to the workers, in batches of a size per worker."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hora.torch as hora


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        for number in range(60):
            sample = torch.randn(5, generator=generator)
            if number % hora.size() == hora.rank():
                yield sample, sample.sum(0, keepdim=True)


hora.init()
torch.manual_seed(1)
model = nn.Linear(5, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05 * hora.size()), model)

for x, y in DataLoader(Stream(), batch_size=6):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
