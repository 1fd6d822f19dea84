# ranks: 3
# verdict: diverged
# at-fault: 0
"""Only rank 0 restores the momentum of the run that it resumes."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(1200, 6)
loader = hora.data_loader((x, x.sum(1, keepdim=True)), global_batch=12, seed=1)
model = nn.Linear(6, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9), model)
hora.broadcast_parameters(model)
if hora.rank() == 0:
    state = optimizer.state_dict()
    state["state"] = {i: {"momentum_buffer": torch.ones_like(p)} for i, p in enumerate(model.parameters())}
    optimizer.load_state_dict(state)

for batch, target in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
