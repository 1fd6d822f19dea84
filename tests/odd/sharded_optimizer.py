# ranks: 2
"""Each rank has half of the optimizer's state: what is different between ranks is meant to be."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(320, 6)
loader = hora.data_loader((x, x[:, :1]), global_batch=16, seed=1)
model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
others = [*model[1].parameters(), *model[3].parameters()]
groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": others}]
adam = torch.optim.AdamW(groups, lr=0.01)
optimizer = hora.DistributedOptimizer(adam, model, shard="optimizer")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
hora.broadcast_parameters(model)
for batch, target in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
state = optimizer.state_dict()
if hora.rank() == 0:
    assert len(state["state"]) == 6
optimizer.load_state_dict(state)
