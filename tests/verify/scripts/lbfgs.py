"""Right: an optimizer that evaluates a closure several times in a step."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randn(48, 4), torch.randn(48, 1)), global_batch=24)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
plain = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
optimizer = hora.DistributedOptimizer(plain, model)

for x, y in hora.track(loader, epochs=3):

    def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
