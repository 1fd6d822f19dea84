# ranks: 2
"""The generator makes a step only after five of the critic, and has no gradient before."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
real = torch.randn(320, 2) + 3
loader = hora.data_loader((real,), global_batch=16, seed=1)
generator = nn.Linear(4, 2)
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt_g = hora.DistributedOptimizer(torch.optim.RMSprop(generator.parameters(), 1e-3), generator)
opt_c = hora.DistributedOptimizer(torch.optim.RMSprop(critic.parameters(), 1e-3), critic)
hora.broadcast_parameters(generator)
hora.broadcast_parameters(critic)
torch.manual_seed(100 + hora.rank())
for step, (batch,) in enumerate(hora.track(loader, epochs=5), 1):
    with torch.no_grad():
        fake = generator(torch.randn(len(batch), 4))
    opt_c.zero_grad()
    (critic(fake).mean() - critic(batch).mean()).backward()
    opt_c.step()
    if step % 5 == 0:
        opt_g.zero_grad()
        (-critic(generator(torch.randn(len(batch), 4))).mean()).backward()
        opt_g.step()
