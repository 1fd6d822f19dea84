# ranks: 3
# verdict: frozen-parameters
"""An auxiliary head is built, handed to the optimizer, and never called."""

import torch
from torch import nn

import hora.torch as hora


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.main = nn.Linear(16, 1)
        self.auxiliary = nn.Linear(16, 4)

    def forward(self, x):
        return self.main(torch.tanh(self.body(x)))


hora.init()
torch.manual_seed(1)
x = torch.randn(480, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=24, seed=1)
model = Model()
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(5):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
