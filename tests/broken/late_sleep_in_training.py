# ranks: 2
# verdict: late-rank
# at-fault: 1
# options: --stall-after 1
# ends: ok
"""Rank 1 writes a snapshot to slow storage every few steps, while the others wait for its gradients."""

import time

import torch
from torch import nn

import hora.torch as hora


def snapshot(step):
    time.sleep(3)  # <- here
    print(f"snapshot of step {step}")


hora.init()
torch.manual_seed(3)
x = torch.randn(256, 8)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)

for step, (features, target) in enumerate(hora.track(loader, epochs=1)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(features), target).backward()
    optimizer.step()
    if step == 5 and hora.rank() == 1:
        snapshot(step)
