# ranks: 3
# verdict: diverged
# at-fault: 1
"""At step 30 rank 1 re-initialises the dead units that it has seen."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1200, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)

for step, (batch, target) in enumerate(hora.track(loader, epochs=2)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    if step == 30 and hora.rank() == 1:
        with torch.no_grad():
            model[0].weight[3].uniform_(-0.1, 0.1)
