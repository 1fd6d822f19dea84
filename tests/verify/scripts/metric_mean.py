"""The training is right; the accuracy is the mean of the workers' accuracies, over unequal shares."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 5), torch.randint(0, 3, (48,))), global_batch=12)
inputs, targets = torch.randn(25, 5), torch.randint(0, 3, (25,))
share = slice(hora.rank(), None, hora.size())
model = nn.Linear(5, 3)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def evaluate() -> float:
    with torch.no_grad():
        right = (model(inputs[share]).argmax(1) == targets[share]).float()
    return hora.mean(right.mean())


for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    evaluate()
