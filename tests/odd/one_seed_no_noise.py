# ranks: 3
"""The same seed everywhere, and nothing random in the training."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(42)
x = torch.randn(240, 6)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, hora.size(), hora.rank(), seed=42)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.02), named_parameters=model.named_parameters()
)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
