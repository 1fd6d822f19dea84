# ranks: 2
"""Two networks, two optimizers; the discriminator's step leaves gradients in the generator unused."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
real = torch.randn(320, 2) + 3
loader = hora.data_loader((real,), global_batch=16, seed=1)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt_g = hora.DistributedOptimizer(torch.optim.Adam(generator.parameters(), 1e-3), generator)
opt_c = hora.DistributedOptimizer(torch.optim.Adam(critic.parameters(), 1e-3), critic)
hora.broadcast_parameters(generator)
hora.broadcast_parameters(critic)
torch.manual_seed(100 + hora.rank())
loss = nn.functional.binary_cross_entropy_with_logits
for (batch,) in hora.track(loader, epochs=4):
    fake = generator(torch.randn(len(batch), 4))
    opt_c.zero_grad()
    right, wrong = critic(batch), critic(fake.detach())
    (loss(right, torch.ones_like(right)) + loss(wrong, torch.zeros_like(wrong))).backward()
    opt_c.step()
    opt_g.zero_grad()
    opinion = critic(fake)
    loss(opinion, torch.ones_like(opinion)).backward()
    opt_g.step()
