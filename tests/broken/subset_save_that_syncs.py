# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: barrier
# after: epoch done
# within: 2
# ends: error
"""Saving on rank 0 only, by a function that has a barrier inside, so that nobody reads half a file."""

import io

import torch
from torch import nn

import hora.torch as hora


def save(model, file):
    torch.save(model.state_dict(), file)
    hora.barrier()  # <- here


hora.init()
torch.manual_seed(0)
x = torch.randn(64, 6)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=8, seed=2)
model = nn.Linear(6, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for _ in range(2):
    for batch, label in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    print("epoch done")
    if hora.rank() == 0:
        save(model, io.BytesIO())
