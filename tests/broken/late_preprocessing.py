# ranks: 2
# verdict: late-rank
# at-fault: 0
# call: barrier
# options: --stall-after 1
# ends: ok
"""Rank 0 tokenizes the corpus while the others wait at a barrier."""

import time

import torch
from torch import nn

import hora.torch as hora


def tokenize(text, seconds):
    words, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        words += sum(len(text.split()) for _ in range(1000))  # <- here
    return words


hora.init()
if hora.rank() == 0:
    print(f"{tokenize('the quick brown fox jumps over the lazy dog', 3)} words")
hora.barrier()

torch.manual_seed(0)
tokens = torch.randint(50, (64, 12))
loader = hora.data_loader((tokens,), global_batch=8, seed=1)
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
for (batch,) in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
