# ranks: 2
# verdict: rank-failed
# at-fault: 0
# after: [0] saving
# within: 2
# ends: error
"""Rank 0 fails while it saves, and the other one is already at the next epoch."""

import torch
from torch import nn

import hora.torch as hora


def save(model, best):
    print("saving")
    torch.save({"model": model.state_dict(), "best": best["accuracy"]}, "/dev/null")  # <- here


hora.init()
torch.manual_seed(0)
x = torch.randn(64, 4)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=8)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for _ in range(3):
    for batch, label in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    if hora.rank() == 0:
        save(model, best={"acc": 0.5})
