# ranks: 2
"""The embedding and the output layer of a language model share their weights."""

import torch
from torch import nn

import hora.torch as hora


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 30, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.mix(self.embedding(tokens))))


hora.init()
torch.manual_seed(0)
tokens = torch.randint(30, (160, 9))
loader = hora.data_loader((tokens,), global_batch=8, seed=1)
model = Tied()
optimizer = hora.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for (batch,) in hora.track(loader, epochs=4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
