# ranks: 3
# verdict: subset-call
# at-fault: 0
# call: mean
# within: 2
# ends: error
"""The main worker evaluates; three calls further down the accuracy is averaged over all workers."""

import torch
from torch import nn

import hora.torch as hora


def accuracy(model, x, y):
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    return hora.mean(right, weight=len(y))  # <- here


def evaluate(model, data):
    return {"accuracy": accuracy(model, *data)}


def main():
    hora.init()
    is_main = hora.rank() == 0
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = (x[:, 0] > 0).long()
    loader = hora.data_loader((x, y), global_batch=12)
    model = nn.Linear(4, 2)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    hora.broadcast_parameters(model)
    for epoch in range(3):
        for batch, label in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), label).backward()
            optimizer.step()
        if is_main:
            print(epoch, evaluate(model, (x, y)))


main()
