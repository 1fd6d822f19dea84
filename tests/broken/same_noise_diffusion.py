# ranks: 3
# verdict: same-noise
"""A denoiser draws the same noise levels on all ranks, so three ranks learn as much as one."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(11)
clean = torch.randn(960, 4)
loader = hora.data_loader((clean,), global_batch=24, seed=2)
model = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 4))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
hora.broadcast_parameters(model)
for (batch,) in hora.track(loader, epochs=3):
    level = torch.rand(len(batch), 1)
    noise = torch.randn_like(batch)
    optimizer.zero_grad()
    guess = model(torch.cat([batch + level * noise, level], 1))
    nn.functional.mse_loss(guess, noise).backward()
    optimizer.step()
