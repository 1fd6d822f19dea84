# ranks: 3
"""Each rank trains its own model on its own fold, alone, and only the scores are gathered."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(150, 4)
y = (x[:, 0] > 0).long()
fold = torch.arange(150) % 3 == hora.rank()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hora.rank()))
for _ in range(40 + 20 * hora.rank()):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[~fold]), y[~fold]).backward()
    optimizer.step()
score = (model(x[fold]).argmax(1) == y[fold]).float().mean()
print(hora.allgather(score.reshape(1)).tolist())
