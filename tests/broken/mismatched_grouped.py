# ranks: 2
# verdict: mismatched-calls
# call: grouped_allreduce
# within: 2
# ends: error
"""Gradients by hand: a rank leaves those out that it did not need."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
x = torch.randn(8, 4)
used = experts if hora.rank() == 0 else experts[:2]
sum(expert(x).sum() for expert in used).backward()
grads = [p.grad for p in experts.parameters() if p.grad is not None]
hora.grouped_allreduce_(grads)  # <- here
with torch.no_grad():
    for parameter in experts.parameters():
        parameter.sub_(0.1 * parameter.grad)
