# ranks: 3
# verdict: late-rank
# at-fault: 2
# options: --stall-after 1 --stall-abort 2
# ends: hang
"""Rank 2's data set reads from a pipe that nobody feeds, as from a network file system that is gone."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


class Frames(Dataset):
    def __init__(self):
        self.frames = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
        self.source, self.feed = os.pipe()

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        if i == 50:
            os.read(self.source, 1)  # <- here
        return self.frames[i], self.frames[i, :2]


hora.init()
frames = Frames()
sampler = DistributedSampler(frames, hora.size(), hora.rank(), shuffle=False)
loader = DataLoader(frames, batch_size=4, sampler=sampler)
model = nn.Linear(8, 2)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
