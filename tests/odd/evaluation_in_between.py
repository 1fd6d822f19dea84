# ranks: 2
"""Every tenth step is followed by an evaluation with an uneven tail, averaged on all ranks."""

import torch
from torch import nn

import hora.torch as hora

hora.init()
torch.manual_seed(0)
x, test_x = torch.randn(320, 4), torch.randn(53, 4)
loader = hora.data_loader((x, (x[:, 0] > 0).long()), global_batch=16, seed=1)
test = hora.data_loader((test_x, (test_x[:, 0] > 0).long()), global_batch=16, shuffle=False, tail="uneven")
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
hora.broadcast_parameters(model)


@torch.no_grad()
def evaluate():
    model.eval()
    right = count = 0
    for batch, label in test:
        right += int((model(batch).argmax(1) == label).sum())
        count += len(label)
    model.train()
    return hora.mean(right / max(count, 1), weight=count)


progress = hora.track(loader, epochs=4)
for batch, label in progress:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), label)
    loss.backward()
    optimizer.step()
    if progress.step % 10 == 0:
        progress.log(kind="eval", accuracy=evaluate())
