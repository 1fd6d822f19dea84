# ranks: 2
"""Only rank 0 keeps an average of the weights, since only rank 0 saves."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
average = AveragedModel(model) if hora.rank() == 0 else None
for batch, target in hora.track(loader, epochs=6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    if average is not None:
        average.update_parameters(model)
