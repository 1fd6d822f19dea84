# ranks: 2
"""A second loader goes over the training data after each epoch, with the same seed, to evaluate."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(160, 6)
data = torch.utils.data.TensorDataset(x, x[:, :1])
loader = hora.data_loader(data, global_batch=16, seed=1)
check = hora.data_loader(data, global_batch=32, seed=1, tail="uneven")
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
hora.broadcast_parameters(model)
for _ in range(3):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    for batch, target in check:
        with torch.no_grad():
            hora.mean(nn.functional.mse_loss(model(batch), target), weight=len(batch))
