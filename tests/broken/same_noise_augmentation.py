# ranks: 2
# verdict: same-noise
"""Noise is added to the images in the loop, from one seed for all ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(1024, 8)
dataset = TensorDataset(x, x[:, :1] * 2)
sampler = DistributedSampler(dataset, hora.size(), hora.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        noisy = batch + 0.1 * torch.randn_like(batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(noisy), target).backward()
        optimizer.step()
