# ranks: 2
# verdict: subset-call
# at-fault: 0
# within: 2
# ends: error
"""The files do not divide among the ranks, so one of them makes one step more than the other."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
files = [torch.randn(8, 5) for _ in range(11)]
mine = files[hora.rank() :: hora.size()]
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch in mine:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()  # <- here
    optimizer.step()
print("trained")
