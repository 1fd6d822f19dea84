# ranks: 3
# verdict: not-finite
# at-fault: 2
"""A missing value in rank 2's part of the table."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(240, 4)
y = x.sum(1, keepdim=True)
x[110, 2] = float("nan")
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, hora.size(), hora.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()  # <- here
    optimizer.step()
