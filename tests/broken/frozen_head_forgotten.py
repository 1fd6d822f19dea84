# ranks: 2
# verdict: frozen-parameters
"""The encoder and the head are modules of their own, and the optimizer was given one of them."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
head = nn.Linear(16, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.Adam(encoder.parameters()), named_parameters=encoder.named_parameters()
)
hora.broadcast_parameters(encoder)
hora.broadcast_parameters(head)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(head(encoder(batch)), target).backward()
    optimizer.step()
