# ranks: 3
# verdict: late-rank
# at-fault: 1
# options: --stall-after 1
# ends: ok
"""Rank 1 unpacks the data set before it joins the job."""

import os
import time

import torch
from torch import nn

import hora.torch as hora


def unpack():
    if os.environ.get("LOCAL_RANK") == "1":
        time.sleep(3)  # <- here


unpack()
hora.init()
torch.manual_seed(0)
x = torch.randn(96, 3)
loader = hora.data_loader((x, x @ torch.ones(3, 1)), global_batch=12)
model = nn.Linear(3, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
