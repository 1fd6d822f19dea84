# ranks: 3
"""Bad samples raise, and every rank skips the same ones."""

import torch
from torch import nn

import hora.torch as hora


def parse(i):
    if i % 7 == 3:
        raise ValueError(f"record {i} is malformed")
    return torch.randn(4, generator=torch.Generator().manual_seed(10 * i + hora.rank()))


hora.init()
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
skipped = 0
for i in range(60):
    try:
        sample = parse(i)
    except ValueError:
        skipped += 1
        continue
    optimizer.zero_grad()
    nn.functional.mse_loss(model(sample), sample[:1]).backward()
    optimizer.step()
print("skipped", skipped)
