# ranks: 2
"""A thread prepares batches and another one writes a log; the collectives stay in the main thread."""

import queue
import threading

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x = torch.randn(160, 4)
loader = hora.data_loader((x, x[:, :1] * 2), global_batch=8, seed=1)
ready = queue.Queue(maxsize=4)
log = queue.Queue()


def prepare():
    for batch in loader:
        ready.put(batch)
    ready.put(None)


def write():
    while (line := log.get()) is not None:
        print(line)


model = nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)
threads = [threading.Thread(target=prepare), threading.Thread(target=write)]
for thread in threads:
    thread.start()
while (item := ready.get()) is not None:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(item[0]), item[1])
    loss.backward()
    optimizer.step()
    log.put(f"{loss:.3f}")
log.put(None)
for thread in threads:
    thread.join()
