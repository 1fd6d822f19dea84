# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: mean
# after: trained
# within: 2
# ends: error
"""The final evaluation runs on rank 0 alone and averages; the other rank has ended by then."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(80, 4)
y = (x[:, 0] > 0).long()
loader = hora.data_loader((x, y), global_batch=8)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, label in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
print("trained")
if hora.rank() == 0:
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    print("accuracy", hora.mean(right))  # <- here
