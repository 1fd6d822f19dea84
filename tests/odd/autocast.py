# ranks: 2
"""Mixed precision with bfloat16, weights in float32."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(batch), label)
    loss.backward()
    optimizer.step()
