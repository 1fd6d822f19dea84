# ranks: 2
"""After each epoch the same loader goes over the training data once more, to evaluate."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(320, 4)
dataset = TensorDataset(x, x[:, :1] * 2)
sampler = DistributedSampler(dataset, hora.size(), hora.rank(), shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    with torch.no_grad():
        for batch, target in loader:
            hora.mean(nn.functional.mse_loss(model(batch), target), weight=len(batch))
