# ranks: 2
# verdict: frozen-parameters
# ends: ok
"""The step of a sharded optimizer is undone, for one layer, by weights that are clamped too hard."""

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
nn.init.constant_(model[0].weight, 0.1)
optimizer.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(0.1, 0.1))
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
