# ranks: 2
"""A student and a teacher with equal shapes; the teacher follows the student and has no gradients."""

import copy

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x,), global_batch=16, seed=1)
student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(student.parameters(), lr=0.001), student)
hora.broadcast_parameters(student)
hora.broadcast_parameters(teacher)
torch.manual_seed(77 * (hora.rank() + 1))
for (batch,) in hora.track(loader, epochs=4):
    one, two = batch + 0.1 * torch.randn_like(batch), batch + 0.1 * torch.randn_like(batch)
    optimizer.zero_grad()
    nn.functional.mse_loss(student(one), teacher(two)).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
