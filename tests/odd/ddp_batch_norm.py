# ranks: 2
"""DDP copies rank 0's batch-norm statistics before each forward pass, so that they differ after the last."""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(192, 6)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, hora.size(), hora.rank())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (batch, target) in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
        last = number % 4 == 3
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.mse_loss(model(batch), target) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
