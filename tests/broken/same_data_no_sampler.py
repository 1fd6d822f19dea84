# ranks: 2
# verdict: same-data
"""A plain loader without a sampler: every rank reads all the data in the same order."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(400, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
