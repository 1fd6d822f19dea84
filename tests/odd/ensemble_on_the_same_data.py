# ranks: 2
"""Each rank trains a member of an ensemble on all of the data; only the predictions are averaged."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hora.torch as hora

hora.init()
torch.manual_seed(1000 + hora.rank())
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(128, 6, generator=torch.Generator().manual_seed(3))
y = (x.sum(1) > 0).long()
for _ in range(3):
    for batch, target in DataLoader(TensorDataset(x, y), batch_size=16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
with torch.no_grad():
    together = hora.allreduce(model(x).softmax(1))
print("accuracy", (together.argmax(1) == y).float().mean().item())
