# ranks: 3
# verdict: straggler
# at-fault: 2
"""Rank 2 reads its samples from a slow disk."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


class Files(Dataset):
    def __init__(self):
        self.x = torch.randn(1440, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        time.sleep(0.012 if hora.rank() == 2 else 0.002)
        return self.x[i], self.x[i, :1]


hora.init()
files = Files()
sampler = DistributedSampler(files, hora.size(), hora.rank())
loader = DataLoader(files, batch_size=4, sampler=sampler)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
