"""The mean over each worker's tokens, of which the workers have different numbers."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
tokens = torch.randint(0, 11, (48, 7))
lengths = torch.randint(2, 8, (48,))
tokens[torch.arange(7) >= lengths[:, None]] = -100
loader = hora.data_loader((tokens,), global_batch=12)
model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

for (batch,) in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    scores = model(batch[:, :-1].clamp(min=0))
    F.cross_entropy(scores.transpose(1, 2), batch[:, 1:], ignore_index=-100).backward()
    optimizer.step()
