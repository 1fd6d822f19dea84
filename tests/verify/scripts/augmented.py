"""Augmentation inside the data set, by random numbers of the worker's loader."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hora.torch as hora


class Noisy(Dataset):
    def __init__(self) -> None:
        self.inputs, self.targets = torch.randn(48, 5), torch.randint(0, 3, (48,))

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] * (1 + 0.3 * torch.rand(5)), self.targets[index]


hora.init()
torch.manual_seed(1)
dataset = Noisy()
sampler = DistributedSampler(dataset, hora.size(), hora.rank())
loader = DataLoader(dataset, batch_size=12 // hora.size(), sampler=sampler)
model = nn.Linear(5, 3)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
