"""Right: Horovod's form, torch's loader and sampler, a batch that is divided among the workers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hora.torch as hvd

hvd.init()
torch.manual_seed(42)
dataset = TensorDataset(torch.randn(96, 5), torch.randint(0, 3, (96,)))
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, batch_size=12 // hvd.size(), sampler=sampler)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        hvd.allreduce(loss.detach(), name="loss")
