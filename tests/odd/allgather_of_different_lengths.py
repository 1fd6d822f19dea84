# ranks: 3
"""Each rank gathers as many detections as it found, none included."""

import torch

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
for step in range(12):
    found = torch.randn((step * (hora.rank() + 1)) % 5, 4)
    boxes = hora.allgather(found, name="boxes")
    counts = hora.allgather(torch.tensor([len(found)]))
    assert len(boxes) == int(counts.sum())
