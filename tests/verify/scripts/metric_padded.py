"""The training is right; the evaluation's sampler repeats samples, so that all workers have as many."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 5), torch.randint(0, 3, (48,))), global_batch=12)
held = TensorDataset(torch.randn(25, 5), torch.randint(0, 3, (25,)))
sampler = DistributedSampler(held, hora.size(), hora.rank(), shuffle=False)
test = DataLoader(held, batch_size=8, sampler=sampler)
model = nn.Linear(5, 3)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y).item() for x, y in test]
    hora.allreduce(torch.tensor(sum(losses) / len(losses)))
