# ranks: 2
# verdict: diverged
"""DDP's module is unwrapped for evaluation, and training goes on with what came back."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(2048, 4)
y = x.sum(1, keepdim=True)
mine = torch.arange(len(x))[hora.rank() :: hora.size()]
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, chosen in enumerate(mine.split(8)):
    if step == 20:
        model = model.module
        model.eval()
        model.train()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
    optimizer.step()
