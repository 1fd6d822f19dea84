# ranks: 2
"""torch's own loader with workers and a distributed sampler."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(192, 4)
dataset = TensorDataset(x, x[:, :1] * 2)
sampler = DistributedSampler(dataset, hora.size(), hora.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1, persistent_workers=True)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
