# ranks: 2
# verdict: rank-failed
# at-fault: 1
# within: 2
# ends: error
"""A file of rank 1's share is damaged; it is read in a loader's own process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hora.torch as hora


class Images(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        if i == 21:
            raise OSError(f"image {i} is truncated")  # <- here
        generator = torch.Generator().manual_seed(i)
        return torch.randn(6, generator=generator), i % 2


hora.init()
images = Images()
sampler = DistributedSampler(images, hora.size(), hora.rank(), shuffle=False)
loader = DataLoader(images, batch_size=4, sampler=sampler, num_workers=1)
model = nn.Linear(6, 2)
optimizer = hora.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hora.broadcast_parameters(model.state_dict(), root_rank=0)
for batch, label in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), label).backward()
    optimizer.step()
