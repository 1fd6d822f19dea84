# ranks: 4
"""Two pairs of ranks train two models, each with its own number of steps and shapes."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
first, second = hora.add_process_set([0, 1]), hora.add_process_set([2, 3])
mine = first if first.included() else second
width, steps = (4, 30) if mine is first else (7, 55)
torch.manual_seed(width)
model = nn.Linear(width, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, process_set=mine)
torch.manual_seed(hora.rank())
for _ in range(steps):
    batch = torch.randn(8, width)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    hora.allreduce(loss.detach(), process_set=mine)
print(hora.allgather(loss.detach().reshape(1)).tolist())
