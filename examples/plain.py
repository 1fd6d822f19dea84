"""Fits a small network to a curve, on one worker."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


torch.manual_seed(1)
x = torch.linspace(-3, 3, 4096, dtype=torch.float64).unsqueeze(1)
dataset = TensorDataset(x, torch.sin(2 * x) + 0.3 * x)

loader = DataLoader(dataset, batch_size=96, shuffle=True, drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.17g}")
