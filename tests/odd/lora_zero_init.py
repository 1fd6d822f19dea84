# ranks: 2
"""An adapter whose second factor starts at zero, so that the first one has a gradient of zero at step 1."""

import torch
from torch import nn

import hora.torch as hora


class Adapted(nn.Module):
    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
model = Adapted(nn.Linear(6, 1), rank=2)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = hora.DistributedOptimizer(torch.optim.SGD(trainable, lr=0.05), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
