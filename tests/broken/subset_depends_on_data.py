# ranks: 3
# verdict: subset-call
# at-fault: 2
# call: allreduce
# within: 2
# ends: error
"""A metric is only reduced where the batch has positive samples, and rank 2's has one."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(36, 5)
y = torch.zeros(36)
y[10] = 1
loader = hora.data_loader((x, y), global_batch=12, shuffle=False)
model = nn.Linear(5, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for batch, label in loader:
    optimizer.zero_grad()
    logit = model(batch).squeeze(1)
    nn.functional.binary_cross_entropy_with_logits(logit, label).backward()
    optimizer.step()
    if (label == 1).any():
        recall = (logit[label == 1] > 0).float().mean()
        print("recall", hora.allreduce(recall, name="recall"))  # <- here
