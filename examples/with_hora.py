"""Fits a small network to a curve, on any number of workers: `hora run -n 2 examples/with_hora.py`."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import hora.torch as hora

hora.init()
torch.manual_seed(1)
x = torch.linspace(-3, 3, 4096, dtype=torch.float64).unsqueeze(1)
dataset = TensorDataset(x, torch.sin(2 * x) + 0.3 * x)

loader = hora.data_loader(dataset, global_batch=96, seed=1)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).double().to(hora.device())
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)

for x, y in hora.track(loader, epochs=5):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    loss = hora.mean(loss, weight=len(x))
    if hora.rank() == 0:
        print(f"{loss:.17g}")
