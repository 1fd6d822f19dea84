# ranks: 2
"""Operations are started in one order everywhere and waited for in another on each rank."""

import torch

import hora.torch as hora

hora.init()
for step in range(10):
    handles = [hora.allreduce_async(torch.full((3,), float(i + step))) for i in range(4)]
    handles += [hora.broadcast_async(torch.arange(5.0), root_rank=1)]
    for handle in handles if hora.rank() == 0 else reversed(handles):
        hora.synchronize(handle)
