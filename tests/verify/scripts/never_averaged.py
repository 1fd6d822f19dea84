"""The optimizer was never made a distributed one."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 5), torch.randint(0, 3, (48,))), global_batch=12)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hora.broadcast_parameters(model)

for x, y in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
