"""Right: Hora's loader, a schedule that counts steps, clipping of the global gradient, a weighted metric."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x, y = torch.randn(120, 5), torch.randint(0, 3, (120,))
loader = hora.data_loader((x, y), global_batch=12, seed=1)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).to(hora.device())
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
hora.broadcast_parameters(model)

for x, y in hora.track(loader, epochs=10):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    schedule.step()
    hora.mean(loss, weight=len(x))
