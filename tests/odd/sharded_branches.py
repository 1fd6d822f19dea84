# ranks: 3
"""Layers that some steps do not use, gradients that add up, and a scaler, with a sharded optimizer."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
model = nn.ModuleDict({"left": nn.Linear(6, 4), "right": nn.Linear(6, 4), "head": nn.Linear(4, 1)})
hora.broadcast_parameters(model)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model, shard="optimizer"
)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
torch.manual_seed(0)
x = torch.randn(480, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=24, seed=1)
for step, (batch, target) in enumerate(hora.track(loader, epochs=2)):
    side = "left" if step // 2 % 3 else "right"
    loss = nn.functional.mse_loss(model["head"](model[side](batch)), target) / 2
    scaler.scale(loss).backward()
    if step % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
