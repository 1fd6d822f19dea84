# ranks: 3
"""A mixture of experts: which of them get gradients depends on the rank's samples."""

import torch
from torch import nn

import hora.torch as hora


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

    def forward(self, x):
        kind = int(x[0, 0] > 0) * 2 + int(x[0, 1] > 0)
        return self.experts[kind](x)


hora.init()
torch.manual_seed(0)
x = torch.randn(360, 4)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = Mixture()
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
