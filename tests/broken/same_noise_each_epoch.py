# ranks: 2
# verdict: same-noise
"""numpy is seeded by rank and worker, but alike in each epoch, since loader workers start anew."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


class Augmented(Dataset):
    def __init__(self):
        self.x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = np.random.normal(0, 0.1, 8)
        return self.x[i] + torch.from_numpy(noise).float(), self.x[i, :1]


def seed_worker(worker):
    np.random.seed(100 * hora.rank() + worker)


hora.init()
torch.manual_seed(hora.rank())
data = Augmented()
sampler = DistributedSampler(data, hora.size(), hora.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
model = nn.Linear(8, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
