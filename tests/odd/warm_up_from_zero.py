# ranks: 2
"""The learning rate starts at zero, so that nothing moves in the first step."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    scheduler.step()
