# ranks: 2
"""Two tasks take turns, so that one head has no gradient in the first step."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
loader = hora.data_loader((x, x.sum(1, keepdim=True), x.prod(1, keepdim=True)), global_batch=16, seed=1)
body = nn.Linear(4, 16)
heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
model = nn.ModuleDict({"body": body, "heads": heads})
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
hora.broadcast_parameters(model)
for step, (batch, total, product) in enumerate(hora.track(loader, epochs=4)):
    task = step % 2
    optimizer.zero_grad()
    out = heads[task](torch.relu(body(batch)))
    nn.functional.mse_loss(out, (total, product)[task]).backward()
    optimizer.step()
