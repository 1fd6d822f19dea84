# ranks: 2
"""Steps with a gradient that is not finite are left out, on all ranks alike since gradients are equal."""

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
scale, skipped = 2.0**120, 0
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    (nn.functional.mse_loss(model(batch), target) * scale * 1e6).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if not torch.isfinite(norm):
        skipped += 1
        scale /= 16
        continue
    for parameter in model.parameters():
        parameter.grad /= scale * 1e6
    optimizer.step()
print("left out", skipped)
