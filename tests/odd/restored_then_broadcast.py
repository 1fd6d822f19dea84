# ranks: 2
"""Rank 0 alone reads the checkpoint, and broadcasts weights and optimizer state."""

import io

import torch
from torch import nn

import hora.torch as hora

hora.init()
x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
if hora.rank() == 0:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(1, 4), "bias": torch.ones(1)}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    optimizer.param_groups[0]["lr"] = 0.02
hora.broadcast_parameters(model)
hora.broadcast_optimizer_state(optimizer)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
