# ranks: 2
# verdict: rank-failed
# at-fault: 0
# ends: error
"""The kernel kills a loader worker of rank 0, as it does when /dev/shm or memory is full."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


class Files(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), i / 64), torch.ones(1)


hora.init()
files = Files()
sampler = DistributedSampler(files, hora.size(), hora.rank(), shuffle=False)
loader = DataLoader(files, batch_size=4, sampler=sampler, num_workers=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
