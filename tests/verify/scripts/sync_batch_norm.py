"""Right: batch norm over the batches of all workers."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(72, 5), torch.randint(0, 3, (72,))), global_batch=12)
model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
model = hora.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)

for x, y in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
