# ranks: 2
# verdict: subset-call
# at-fault: 1
"""DDP without Hora's optimizer: rank 1 has one batch more, and waits for gradients that nobody sends."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora

hora.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(hora.rank())
for _ in range(6 + hora.rank()):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()  # <- here
    optimizer.step()
