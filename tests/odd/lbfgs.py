# ranks: 2
"""LBFGS calls its closure as often as its line search wants."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(200, 4, dtype=torch.float64)
mine = x.chunk(hora.size())[hora.rank()]
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
optimizer = hora.DistributedOptimizer(
    torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=5), model
)
hora.broadcast_parameters(model)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True))
    loss.backward()
    return loss


for _ in range(6):
    print(float(optimizer.step(closure)))
