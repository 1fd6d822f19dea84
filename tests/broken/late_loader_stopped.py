# ranks: 2
# verdict: late-rank
# at-fault: 1
# options: --stall-after 1 --stall-abort 3
# ends: hang
# says: loader worker (pid
"""A loader worker of rank 1 is stopped by a signal; the rank itself waits for its batch."""

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
        if i == 41:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.full((4,), i / 64), torch.ones(1)


hora.init()
files = Files()
sampler = DistributedSampler(files, hora.size(), hora.rank(), shuffle=False)
loader = DataLoader(files, batch_size=4, sampler=sampler, num_workers=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, target in loader:  # <- here
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
