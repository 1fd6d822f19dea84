# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: broadcast_object
# within: 2
# ends: error
"""Rank 0 sends its configuration, but nobody told the others to receive one."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
config = {"width": 6, "lr": 0.1}
if hora.rank() == 0:
    config = hora.broadcast_object(config, root_rank=0, name="config")  # <- here
torch.manual_seed(0)
x = torch.randn(32, 3)
loader = hora.data_loader((x, x[:, :1]), global_batch=8)
model = nn.Sequential(nn.Linear(3, config["width"]), nn.Linear(config["width"], 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=config["lr"]), model)
hora.broadcast_parameters(model)
for batch, target in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
