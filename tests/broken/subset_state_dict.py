# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: state_dict
# ends: error
"""Rank 0 saves the state of a sharded optimizer, to which every rank has to give its share."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, shard="optimizer")
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
if hora.rank() == 0:
    state = optimizer.state_dict()  # <- here
    torch.save(state, "/dev/null")
hora.barrier()
