# ranks: 2
# verdict: frozen-parameters
"""The backbone is unfrozen after an epoch, and the optimizer was made of the head alone."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.randn(512, 8)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model[0].requires_grad_(False)
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = hora.DistributedOptimizer(torch.optim.SGD(trainable, lr=0.01), model)  # <- here
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=14):
    if loader.epoch == 1:
        model[0].requires_grad_(True)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
