# ranks: 3
# options: --stall-after 1
"""The declaration stands under the condition on the rank; the others are at the next collective."""

import time

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(120, 4)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=12, seed=1)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for epoch in range(2):
    for batch, label in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    if hora.rank() == 0 and epoch == 0:
        with hora.only(0):
            time.sleep(2.5)
            print((model(x).argmax(1) == (x[:, 0] > 0)).float().mean().item())
