# ranks: 2
# verdict: diverged
# at-fault: 0, 1
# says: something has changed it afterwards
"""Gradients are averaged by hand, and then clipped wherever a rank's own loss is large."""

import torch
import torch.distributed as dist
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(256, 8)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
hora.broadcast_parameters(model)
for batch, target in hora.track(hora.data_loader((x, x[:, :1] * 2), global_batch=16), epochs=3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= hora.size()
    if loss.item() > 3:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
