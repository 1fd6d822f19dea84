# ranks: 3
"""Each rank trains on its own fold, with the dropout of one seed on all, so that only the folds differ."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(90, 5)
y = (x.sum(1) > 0).long()
mine = torch.arange(90) % 3 == hora.rank()
model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(6):
    for batch, target in DataLoader(TensorDataset(x[~mine], y[~mine]), batch_size=12, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    accuracy = (model(x[mine]).argmax(1) == y[mine]).float().mean()
print("folds", hora.allgather(accuracy.view(1)).tolist())
