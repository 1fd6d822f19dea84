# ranks: 2
# verdict: subset-call | late-rank
# options: --stall-after 1 --stall-abort 3
# ends: hang
"""torch.distributed's own barrier, on rank 0 only."""

import torch
import torch.distributed as dist

import hora.torch as hora

hora.init()
for _ in range(3):
    hora.allreduce(torch.ones(3))
if hora.rank() == 0:
    dist.barrier()
hora.allreduce(torch.ones(3))
