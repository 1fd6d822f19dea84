# ranks: 3
# verdict: not-finite
# at-fault: 1
"""The mean over an empty mask: rank 1's batch has no labelled token."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(1)
tokens = torch.randint(20, (72, 6))
labelled = torch.ones(72, 6)
labelled[16:20] = 0
loader = hora.data_loader((tokens, labelled), global_batch=12, shuffle=False)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
for batch, mask in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch).transpose(1, 2), batch, reduction="none")
    (loss * mask).sum().div(mask.sum()).backward()  # <- here
    optimizer.step()
