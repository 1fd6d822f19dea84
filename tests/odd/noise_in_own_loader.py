# ranks: 2
"""Noise in the workers of Hora's own loader, which seeds each sample by its place."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import hora.torch as hora


class Augmented(Dataset):
    def __init__(self):
        self.x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = np.random.normal(0, 0.1, 8)
        return self.x[i] + torch.from_numpy(noise).float(), self.x[i, :1]


hora.init()
torch.manual_seed(0)
data = Augmented()
loader = hora.data_loader(data, global_batch=16, seed=1, num_workers=2)
model = nn.Linear(8, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for _ in range(3):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
