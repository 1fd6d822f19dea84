"""Two epochs of ten steps, with a checkpoint at every fifth."""

import time

import torch

import hora.torch as hora

hora.init()
torch.manual_seed(0)
inputs = torch.randn(80, 4)
loader = hora.data_loader((inputs, inputs.sum(1, keepdim=True)), global_batch=8, seed=1)
model = torch.nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
checkpoints = hora.Checkpoints({"model": model, "optimizer": optimizer, "loader": loader}, every=5, keep=2)
checkpoints.restore()
tracker = hora.track(loader, epochs=2)
for x, y in tracker:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    tracker.log(loss=hora.mean(loss.detach(), weight=len(x)))
    checkpoints.step()
    time.sleep(0.05)  # for moments in between; stands for a larger model
