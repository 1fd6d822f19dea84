# ranks: 2
"""Gradients travel in half precision."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 8)
loader = hora.data_loader((x, x[:, :4]), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05),
    named_parameters=model.named_parameters(),
    compression=hora.Compression.fp16,
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch, target in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
