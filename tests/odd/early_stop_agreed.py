# ranks: 3
"""Each rank votes, and all stop when one wants to."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(300, 3)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=30, seed=1)
model = nn.Linear(3, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model)
hora.broadcast_parameters(model)
for epoch in range(50):
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
    wants = torch.tensor([loss.item() < 1e-3])
    if hora.allreduce(wants, op=hora.Max).item():
        print("all stop after epoch", epoch)
        break
