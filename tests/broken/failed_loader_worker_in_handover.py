# ranks: 2
# verdict: rank-failed
# at-fault: 0
# ends: error
# says: was killed by SIGKILL
"""A loader worker of rank 0 is killed while it hands a batch over: the rank sees a lost connection."""

import multiprocessing.reduction
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Files(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 40:
            multiprocessing.reduction.send_handle = die
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
