# ranks: 2
# verdict: impossible-plan
# ends: error
"""A warm-up of 500 steps, written for a larger data set; this run has 40."""

import torch
from torch import nn

import hora.torch as hora
from hora.torch.optim.schedule import polynomial

hora.init()
torch.manual_seed(1)
x = torch.randn(160, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: polynomial(step, base=1.0, end=0.0, warmup=500, total=5000)
)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    scheduler.step()
