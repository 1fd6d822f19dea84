"""Each worker clips its own gradient by hand, and the clipped ones are averaged."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 5), torch.randint(0, 3, (48,))), global_batch=12)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for x, y in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, 0.1 / norm.item())
    for parameter in model.parameters():
        parameter.grad = hora.allreduce(parameter.grad)
    optimizer.step()
