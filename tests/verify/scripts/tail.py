"""The last accumulation window of an epoch is short, but divided by the full number of passes."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
window = 6 // hora.size()
dataset = (torch.randn(50, 5), torch.randint(0, 3, (50,)))
micro = hora.data_loader(dataset, global_batch=2 * hora.size(), seed=1, tail="uneven")
model = nn.Linear(5, 3)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for _ in range(2):
    optimizer.zero_grad()
    for number, (x, y) in enumerate(micro, 1):
        (F.cross_entropy(model(x), y) / window).backward()
        if number % window == 0 or number == len(micro):
            optimizer.step()
            optimizer.zero_grad()
