"""The mean over each worker's samples, although the last global batch is shared out unevenly."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(27, 5), torch.randint(0, 3, (27,))), global_batch=12, tail="uneven")
model = nn.Linear(5, 3)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for x, y in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
