"""Every worker reads the same batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hora.torch as hora

hora.init()
torch.manual_seed(3)
dataset = TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,)))
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model = nn.Linear(5, 3)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
