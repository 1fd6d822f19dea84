# ranks: 2
# verdict: frozen-parameters
"""A second head is added to the model after the optimizer was made, and is in no optimizer."""

import torch
from torch import nn

import hora.torch as hora


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden), self.auxiliary(hidden)


hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = Model()
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)  # <- here
model.auxiliary = nn.Linear(16, 1)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    out, auxiliary = model(batch)
    (nn.functional.mse_loss(out, target) + nn.functional.mse_loss(auxiliary, -target)).backward()
    optimizer.step()
