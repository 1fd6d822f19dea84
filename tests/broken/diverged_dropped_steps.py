# ranks: 2
# verdict: diverged
"""A rank drops its step when its own loss is an outlier, by setting the gradients to zero."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6)
target = x.sum(1, keepdim=True)
target[::40] += 20
loader = hora.data_loader((x, target), global_batch=16, seed=4)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.005), model)
hora.broadcast_parameters(model)

for batch, y in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), y)
    loss.backward()
    if loss.item() > 30:
        for parameter in model.parameters():
            parameter.grad.zero_()
    optimizer.step()
