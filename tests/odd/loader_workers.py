# ranks: 2
"""Samples are made by forked loader workers, with random numbers of their own."""

import torch
from torch import nn
from torch.utils.data import Dataset

import hora.torch as hora


class Noisy(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        x = torch.full((4,), i / 96) + 0.1 * torch.randn(4)
        return x, x[:1] * 2


hora.init()
torch.manual_seed(0)
loader = hora.data_loader(Noisy(), global_batch=16, seed=1, num_workers=2)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
