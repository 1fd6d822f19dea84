"""Right: fewer micro-batches with more workers, and each window is divided by its own length."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x, y = torch.randn(52, 5, dtype=torch.float64), torch.randint(0, 3, (52,))
window = 6 // hora.size()
loader = hora.data_loader((x, y), global_batch=2 * hora.size(), seed=1, shuffle=False)
model = nn.Linear(5, 3).double()
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for _ in range(2):
    batches = list(loader)
    while batches:
        part, batches = batches[:window], batches[window:]
        optimizer.zero_grad()
        for x, y in part:
            (F.cross_entropy(model(x), y) / len(part)).backward()
        optimizer.step()
