# ranks: 2
# verdict: subset-call | late-rank
# options: --stall-after 1 --stall-abort 3
# ends: hang
"""Plain DDP with unequal numbers of batches, then a mean."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora

hora.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(hora.rank())
for _ in range(10 + hora.rank()):
    batch = torch.randn(8, 4)
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
print(hora.mean(loss))
