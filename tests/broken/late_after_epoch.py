# ranks: 3
# verdict: late-rank
# at-fault: 0
# call: mean
# options: --stall-after 1
# ends: ok
"""Rank 0 evaluates alone after the epoch, for longer than the others are told to wait."""

import time

import torch
from torch import nn

import hora.torch as hora


def evaluate(model, images):
    model.eval()
    right = 0
    with torch.no_grad():
        for image in images:
            right += int(model(image.unsqueeze(0)).argmax())
            time.sleep(0.5)  # <- here
    model.train()
    return right / len(images)


hora.init()
torch.manual_seed(0)
x = torch.randn(120, 5)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=12, seed=2)
model = nn.Linear(5, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), label)
    loss.backward()
    optimizer.step()
if hora.rank() == 0:
    print(evaluate(model, x[:6]))
print(hora.mean(loss, weight=len(batch)))
