# ranks: 2
# verdict: diverged
"""The model is wrapped in DDP, but a loss function calls the module inside the wrapper."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


def loss_function(model, batch, target):
    return nn.functional.mse_loss(model.module(batch), target)


hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, hora.size(), hora.rank(), seed=1)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        loss_function(model, batch, target).backward()
        optimizer.step()
