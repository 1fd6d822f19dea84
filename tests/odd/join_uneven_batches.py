# ranks: 3
"""Every rank has its own number of batches, and says when it has no more."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(90, 4)
target = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
hora.broadcast_parameters(model)
for epoch in range(3):
    mine = range(hora.rank(), 3 + 9 * ((hora.rank() + epoch) % 3), 3)
    for batch in mine:
        rows = slice(3 * batch, 3 * batch + 3)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), target[rows]).backward()
        optimizer.step()
    last = hora.join()
loss = hora.mean(nn.functional.mse_loss(model(x), target).detach())
if hora.rank() == 0:
    print(f"loss {loss:.4f}; the last rank to join was {last}")
