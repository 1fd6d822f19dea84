# ranks: 2
"""Three tasks take turns of four steps each, so that the last head waits for its first gradient."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
trunk = nn.Linear(6, 8)
heads = nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])
model = nn.ModuleDict({"trunk": trunk, "heads": heads})
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
x = torch.randn(256, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
for number, (batch, target) in enumerate(hora.track(loader, epochs=2)):
    optimizer.zero_grad()
    head = heads[number // 4 % 3]
    nn.functional.mse_loss(head(trunk(batch).relu()), target).backward()
    optimizer.step()
