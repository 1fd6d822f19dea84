# ranks: 2
# verdict: diverged
"""The head has an optimizer of its own that was never made a distributed one."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
body = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
head = nn.Linear(12, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(body.parameters(), lr=0.01), body)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.02)
hora.broadcast_parameters(body)
hora.broadcast_parameters(head)

for batch, target in hora.track(loader, epochs=3):
    optimizer.zero_grad()
    head_optimizer.zero_grad()
    nn.functional.mse_loss(head(body(batch)), target).backward()
    optimizer.step()
    head_optimizer.step()
