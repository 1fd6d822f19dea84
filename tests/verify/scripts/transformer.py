"""Right: a transformer. The bias of its keys has no gradient but rounding, which Adam amplifies."""

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


hora.init()
torch.manual_seed(1)
loader = hora.data_loader((torch.randint(0, 20, (48, 9)),), global_batch=12)
model = Model()
optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.003), model)

for (tokens,) in hora.track(loader, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(tokens=tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
