# ranks: 2
# verdict: subset-call
# at-fault: 1
# call: gather parameters
# ends: error
"""Rank 0 adds up two backward passes where rank 1 makes a step of a sharded optimizer after each."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, shard="optimizer")
hora.broadcast_parameters(model)
for step, (batch, target) in enumerate(hora.track(loader, epochs=1)):
    nn.functional.mse_loss(model(batch), target).backward()
    if hora.rank() == 1 or step % 2:
        optimizer.step()  # <- here
        optimizer.zero_grad()
