# ranks: 3
"""Each rank sends another number of rows to each."""

import torch

import hora.torch as hora

hora.init()
for step in range(8):
    splits = [(hora.rank() + other + step) % 4 for other in range(hora.size())]
    rows = torch.full((sum(splits), 2), float(hora.rank()))
    received, counts = hora.alltoall(rows, splits=splits)
    assert len(received) == int(counts.sum())
