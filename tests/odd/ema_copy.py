# ranks: 2
"""An exponential average of the weights beside the model, evaluated now and then."""

import copy

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
average = copy.deepcopy(model).requires_grad_(False)
for step, (batch, target) in enumerate(hora.track(loader, epochs=5)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.02)
    if step % 25 == 0:
        print(step, hora.mean(nn.functional.mse_loss(average(batch), target), weight=len(batch)))
