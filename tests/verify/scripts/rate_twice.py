"""The global batch grows with the workers, and the learning rate with its square."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hora.torch as hvd

hvd.init()
torch.manual_seed(42)
dataset = TensorDataset(torch.randn(96, 5), torch.randint(0, 3, (96,)))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, hvd.size(), hvd.rank()))
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size() * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for data, target in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()
