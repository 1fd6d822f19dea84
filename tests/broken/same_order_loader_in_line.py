# ranks: 2
# verdict: same-order
"""Each epoch makes its loader in the line of the loop; set_epoch is forgotten."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(256, 4)
dataset = TensorDataset(x, x[:, :1] * 2)
sampler = DistributedSampler(dataset, hora.size(), hora.rank())
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for _ in range(3):
    for batch, target in DataLoader(dataset, batch_size=16, sampler=sampler):  # <- here
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
