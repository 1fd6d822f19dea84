# ranks: 2
# verdict: same-order
"""set_epoch is never called, and an evaluation on the same loader lies between the epochs."""

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
for _ in range(4):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    with torch.no_grad():
        for batch, target in loader:
            hora.mean(nn.functional.mse_loss(model(batch), target), weight=len(batch))
