# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: broadcast
# within: 2
# ends: error
"""Rank 0 meets a bad record, handles it, and sends the others a replacement that they do not expect."""

import torch
from torch import nn

import hora.torch as hora


def parse(record):
    return torch.tensor([float(word) for word in record.split()])


hora.init()
records = ["1 2 3", "4 5 6", "7 8 ?" if hora.rank() == 0 else "7 8 9", "1 1 1", "2 2 2"]
model = nn.Linear(3, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
hora.broadcast_parameters(model)
for record in records:
    try:
        features = parse(record) + hora.rank()
    except ValueError:
        features = hora.broadcast(torch.zeros(3), root_rank=0)  # <- here
    optimizer.zero_grad()
    model(features).square().sum().backward()
    optimizer.step()
