# ranks: 2
"""Every rank evaluates the whole test set, which is small, after each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(256, 4)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=1)
test_x = torch.randn(80, 4)
test = DataLoader(TensorDataset(test_x, (test_x[:, 0] > 0).long()), batch_size=20)
model = nn.Linear(4, 2)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for epoch in range(4):
    for batch, label in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(batch).argmax(1) == label).sum()) for batch, label in test)
    model.train()
    print(epoch, right / len(test_x))
