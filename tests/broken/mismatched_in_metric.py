# ranks: 2
# verdict: mismatched-calls
# after: epoch 0
# within: 2
# ends: error
"""A metric object decides on this rank's own data what it reduces."""

import torch
from torch import nn

import hora.torch as hora


class MeanIou:
    def __init__(self):
        self.matrix = torch.zeros(4, 4)

    def update(self, predicted, label):
        self.matrix += torch.bincount(label * 4 + predicted, minlength=16).reshape(4, 4)

    def compute(self):
        seen = self.matrix.sum(1) > 0
        matrix = hora.allreduce(self.matrix[seen], op=hora.Sum)  # <- here
        return matrix.diagonal().sum() / matrix.sum()


hora.init()
torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.tensor([0] * 48 + [1] * 8 + [2] * 8)
loader = hora.data_loader((x, y), global_batch=32, shuffle=False)
model = nn.Linear(6, 4)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
metric = MeanIou()
for batch, label in loader:
    optimizer.zero_grad()
    out = model(batch)
    nn.functional.cross_entropy(out, label).backward()
    optimizer.step()
    metric.update(out.argmax(1), label)
print("epoch 0")
print(metric.compute())
