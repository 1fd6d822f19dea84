# ranks: 2
# verdict: late-rank
# at-fault: 1
# options: --stall-after 1 --stall-abort 2
# ends: hang
"""Rank 1 polls for a file of features that nobody writes."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(128, 4)
loader = hora.data_loader((x, (x[:, :1] > 0).float()), global_batch=16)
model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
features = Path(tempfile.gettempdir()) / "features-that-nobody-writes.pt"
waited = 0
for step, (batch, label) in enumerate(loader):
    if step == 4 and hora.rank() == 1:
        while not features.exists():  # <- here
            waited += 1  # <- here
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(model(batch), label).backward()
    optimizer.step()
