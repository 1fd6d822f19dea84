# ranks: 2
# verdict: diverged
"""ReduceLROnPlateau follows each rank's own loss, so that the learning rates part."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6)
noise = torch.cat([torch.zeros(512, 1), 3 * torch.randn(512, 1)])
target = x.sum(1, keepdim=True) + noise
loader = hora.data_loader((x, target), global_batch=32, shuffle=False)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
hora.broadcast_parameters(model)

for batch, y in hora.track(loader, epochs=6):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), y)
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())
