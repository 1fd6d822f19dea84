# ranks: 2
"""A loss scaler that starts much too high: the first steps overflow and are left out."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
hora.broadcast_parameters(model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch) * 8, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(scaler.get_scale())
