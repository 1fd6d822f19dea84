# ranks: 2
# verdict: different-init
"""The seed contains the rank, for dropout's sake, before the weights are drawn."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1 + hora.rank())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
