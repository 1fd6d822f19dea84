"""Right: two models with an optimizer each, and noise that is drawn for the global batch."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 6),), global_batch=12)
maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
making = hora.DistributedOptimizer(torch.optim.Adam(maker.parameters(), lr=0.001), maker)
judging = hora.DistributedOptimizer(torch.optim.Adam(judge.parameters(), lr=0.001), judge)

for (real,) in hora.track(loader, epochs=2):
    noise = torch.randn(12, 4)[hora.rank() * len(real) :][: len(real)]
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    judging.zero_grad()
    wrong = F.binary_cross_entropy_with_logits(judge(maker(noise).detach()), zeros)
    (wrong + F.binary_cross_entropy_with_logits(judge(real), ones)).backward()
    judging.step()
    making.zero_grad()
    F.binary_cross_entropy_with_logits(judge(maker(noise)), ones).backward()
    making.step()
