# ranks: 3
# verdict: different-init | diverged
"""The weights are broadcast, and then initialised once more."""

import torch
from torch import nn

import hora.torch as hora


def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


hora.init()
torch.manual_seed(hora.rank())
x = torch.randn(480, 8, generator=torch.Generator().manual_seed(0))
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=24, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
model.apply(init_weights)
for batch, target in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
