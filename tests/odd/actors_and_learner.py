# ranks: 3
"""Rank 0 learns, the others only act in their environments with the weights that it broadcasts."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01) if hora.rank() == 0 else None
for _ in range(15):
    hora.broadcast_parameters(policy, root_rank=0)
    steps = 0 if hora.rank() == 0 else 4 + hora.rank()
    states = torch.randn(steps, 4)
    with torch.no_grad():
        actions = policy(states).argmax(1)
    states, actions = hora.allgather(states), hora.allgather(actions)
    if optimizer is not None:
        reward = (actions == (states[:, 0] > 0)).float() - 0.5
        optimizer.zero_grad()
        chosen = policy(states).log_softmax(1)[torch.arange(len(states)), actions]
        (-(chosen * reward).mean()).backward()
        optimizer.step()
