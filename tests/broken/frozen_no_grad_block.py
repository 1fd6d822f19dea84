# ranks: 2
# verdict: frozen-parameters
"""The encoder runs under no_grad, left from the time when it was frozen."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(512, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16)
encoder, head = nn.Linear(6, 8), nn.Linear(8, 1)
model = nn.Sequential(encoder, head)
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=2):
    with torch.no_grad():
        features = encoder(batch)
    optimizer.zero_grad()
    nn.functional.mse_loss(head(features), target).backward()
    optimizer.step()
