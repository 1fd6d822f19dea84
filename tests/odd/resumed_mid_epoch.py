# ranks: 2
"""A training stops in the midst of an epoch and goes on from its state."""

import io

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 4)
state = None
for part in (25, None):
    loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=1)
    model = nn.Linear(4, 1)
    optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    if state is not None:
        state.seek(0)
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    else:
        hora.broadcast_parameters(model)
    progress = hora.track(loader, epochs=4)
    for batch, target in progress:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
        if progress.step == part:
            break
    state = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    torch.save({name: thing.state_dict() for name, thing in parts.items()}, state)
