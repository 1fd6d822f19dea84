# ranks: 2
# verdict: subset-call
# at-fault: 1
# within: 2
# ends: error
"""Each rank stops when its own loss is low enough."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(200, 3)
noise = torch.cat([torch.zeros(100, 1), torch.randn(100, 1)])
target = x.sum(1, keepdim=True) + noise
mine = slice(0, 100) if hora.rank() == 0 else slice(100, 200)
model = nn.Linear(3, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model)
hora.broadcast_parameters(model)
for epoch in range(200):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[mine]), target[mine])
    loss.backward()  # <- here
    optimizer.step()
    if loss.item() < 0.1:
        print(f"stopping at epoch {epoch}")
        break
print("done")
