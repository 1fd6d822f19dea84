# ranks: 2
"""Parts of a model have optimizers of their own, one of which steps late, and one part is moved by hand."""

import torch
from torch import nn

import hora.torch as hora


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * self.head(self.body(x).relu())


hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = Model()
body = hora.DistributedOptimizer(torch.optim.SGD(model.body.parameters(), lr=0.01), model.body)
head = torch.optim.Adam(model.head.parameters())
hora.broadcast_parameters(model)
for step, (batch, target) in enumerate(hora.track(loader, epochs=1)):
    model.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    body.step()
    with torch.no_grad():
        model.scale -= 0.01 * hora.allreduce(model.scale.grad)
    if step >= 20:
        for parameter in model.head.parameters():
            parameter.grad = hora.allreduce(parameter.grad)
        head.step()
