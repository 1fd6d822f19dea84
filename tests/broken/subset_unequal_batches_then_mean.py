# ranks: 2
# verdict: subset-call
# at-fault: 1
# within: 2
# ends: error
"""Sentences are packed by length: rank 1 still trains when rank 0 has come to the mean of the epoch."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
lengths = [8, 8, 8, 8] if hora.rank() == 0 else [4, 4, 6, 6, 6, 6]
packs = [torch.randint(20, (length,)) for length in lengths]
model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
total = 0.0
for pack in packs:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(pack[:-1]), pack[1:])
    loss.backward()  # <- here
    optimizer.step()
    total += loss.item()
print(hora.mean(total / len(packs), weight=len(packs)))
