# ranks: 3
# verdict: mismatched-calls
# at-fault: 1
# call: allgather
# within: 2
# ends: error
"""Embeddings are gathered, but one rank still has the width of the older configuration."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
width = 16 if hora.rank() == 1 else 32
encoder = nn.Linear(8, width)
with torch.no_grad():
    embeddings = encoder(torch.randn(4 + hora.rank(), 8))
table = hora.allgather(embeddings, name="embeddings")  # <- here
print(table.shape)
