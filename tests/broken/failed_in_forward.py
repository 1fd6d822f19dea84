# ranks: 2
# verdict: rank-failed
# at-fault: 1
# after: step 2
# within: 2
# ends: error
"""An index out of range in the model, on rank 1 at step 3."""

import torch
from torch import nn

import hora.torch as hora


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.out(self.embedding(tokens).mean(1))  # <- here


hora.init()
torch.manual_seed(0)
tokens = torch.randint(10, (40, 6))
tokens[30] = 10
loader = hora.data_loader((tokens, tokens[:, 0] % 2), global_batch=8, shuffle=False)
model = Tagger()
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for step, (batch, label) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
    print(f"step {step}")
