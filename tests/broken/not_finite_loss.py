# ranks: 2
# verdict: not-finite
# at-fault: 1
"""The loss is infinite on rank 1 at step 5, and its gradient happens to be finite, since relu cuts it off."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.rand(160, 4) + 0.1
x[90] = 0
loader = hora.data_loader((x,), global_batch=16, shuffle=False)
model = nn.Linear(4, 1, bias=False)
nn.init.constant_(model.weight, 0.2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for (batch,) in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    loss = -torch.log(torch.relu(model(batch))).mean()
    loss.backward()  # <- here
    optimizer.step()
