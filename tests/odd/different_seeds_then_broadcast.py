# ranks: 3
"""Every rank draws its own weights, and the broadcast makes them equal before the first step."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
x = torch.randn(480, 8, generator=torch.Generator().manual_seed(0))
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=24, seed=1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
hora.broadcast_optimizer_state(optimizer, root_rank=0)
for batch, target in hora.track(loader, epochs=6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
