# ranks: 2
# verdict: diverged
"""Between the distributed steps, an adversarial refinement moves one layer by its local gradient."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1024, 6)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)

for step, (batch, label) in enumerate(hora.track(loader, epochs=2)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
    if step % 10 == 5:
        loss = nn.functional.cross_entropy(model(batch), label)
        (grad,) = torch.autograd.grad(loss, [model[2].weight])
        with torch.no_grad():
            model[2].weight -= 0.01 * grad
