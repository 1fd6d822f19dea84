# ranks: 2
"""Each rank has half of everything, by torch's fully_shard."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, shard="all")
hora.broadcast_parameters(model)
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
for batch, target in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
