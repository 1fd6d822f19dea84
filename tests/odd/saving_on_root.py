# ranks: 2
"""Rank 0 prints and saves after every epoch, without a collective."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(128, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
folder = Path(tempfile.mkdtemp()) if hora.rank() == 0 else None
for epoch in range(4):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    if folder is not None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **loader.state_dict()}
        torch.save(state, folder / f"{epoch}.pt")
        print("saved", epoch)
