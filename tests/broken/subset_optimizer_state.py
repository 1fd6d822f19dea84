# ranks: 2
# verdict: subset-call
# at-fault: 0
# call: broadcast_optimizer_state
# within: 2
# ends: error
"""The state of the optimizer is broadcast only where a checkpoint was found, which is on rank 0."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import hora.torch as hora

hora.init()
folder = Path(tempfile.mkdtemp())
if hora.rank() == 0:
    torch.save({"epoch": 3}, folder / "last.pt")
torch.manual_seed(0)
x = torch.randn(64, 4)
loader = hora.data_loader((x, x[:, :1]), global_batch=8)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
if (folder / "last.pt").exists():
    hora.broadcast_optimizer_state(optimizer)  # <- here
for batch, target in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
