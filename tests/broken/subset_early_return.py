# ranks: 3
# verdict: subset-call
# at-fault: 0
# call: allgather
# within: 2
# ends: error
"""A report is only made on rank 0, so the others return early; the gathering is further down."""

import torch
from torch import nn

import hora.torch as hora


def report(losses):
    if hora.rank() != 0:
        return
    table = hora.allgather(torch.tensor(losses))  # <- here
    print(f"{len(table)} losses, worst {table.max():.3f}")


hora.init()
torch.manual_seed(0)
x = torch.randn(90, 4)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=9, seed=2)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for _ in range(2):
    losses = []
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report(losses)
