# ranks: 2
# verdict: late-rank
# at-fault: 0
# call: broadcast
# options: --stall-after 1
# ends: ok
"""Rank 0 downloads weights with another program before it broadcasts them."""

import subprocess

import torch
from torch import nn

import hora.torch as hora

hora.init()
model = nn.Linear(10, 2)
if hora.rank() == 0:
    subprocess.run(["sleep", "3"], check=True)  # <- here
hora.broadcast_parameters(model)

torch.manual_seed(0)
x = torch.randn(128, 10)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for batch, label in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
