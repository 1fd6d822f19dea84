# ranks: 2
"""Two trainings in one script, with a shutdown and a new init between them."""

import torch
from torch import nn

import hora.torch as hora


def train(seed):
    hora.init()
    torch.manual_seed(seed)
    x = torch.randn(160, 4)
    loader = hora.data_loader((x, x[:, :1] * 2), global_batch=16, seed=seed)
    model = nn.Linear(4, 1)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    hora.broadcast_parameters(model)
    for batch, target in hora.track(loader, epochs=3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    hora.shutdown()


for seed in (1, 2):
    train(seed)
