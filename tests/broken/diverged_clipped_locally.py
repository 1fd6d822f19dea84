# ranks: 2
# verdict: diverged
"""Gradients are clipped only on the rank whose own loss has a spike."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6)
target = x.sum(1, keepdim=True)
target[::50] *= 8
loader = hora.data_loader((x, target), global_batch=16, seed=1)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)

for batch, y in hora.track(loader, epochs=3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), y)
    loss.backward()
    if loss.item() > 8:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
