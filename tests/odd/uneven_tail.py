# ranks: 3
"""The last global batch is uneven, and some ranks get nothing of it."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(97, 6)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=12, seed=1, tail="uneven")
model = nn.Linear(6, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), label, reduction="sum") / loader.samples_per_worker
    loss.backward()
    optimizer.step()
