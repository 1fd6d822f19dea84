# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: mean
# within: 2
# ends: error
"""A progress bar that lives on rank 0 and shows the mean loss of all ranks."""

import torch
from torch import nn

import hora.torch as hora


class Bar:
    def __init__(self, total):
        self.total, self.done = total, 0

    def update(self, loss):
        self.done += 1
        if self.done % 5 == 0:
            print(f"{self.done}/{self.total} loss {hora.mean(loss):.3f}")  # <- here


hora.init()
torch.manual_seed(0)
x = torch.randn(256, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=16, seed=2)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
bar = Bar(len(loader)) if hora.rank() == 0 else None
for batch, target in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    optimizer.step()
    if bar is not None:
        bar.update(loss.item())
