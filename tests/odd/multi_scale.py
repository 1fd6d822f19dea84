# ranks: 2
"""All ranks draw the same image size for each step from equal generators, so that shapes agree."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
images = torch.randn(256, 1, 12, 12)
loader = hora.data_loader((images, images.mean((1, 2, 3)).gt(0).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=6):
    size = int(torch.randint(6, 13, ()))
    scaled = nn.functional.interpolate(batch, size=(size, size))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(scaled), label).backward()
    optimizer.step()
