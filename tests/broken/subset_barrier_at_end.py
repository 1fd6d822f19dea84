# ranks: 3
# verdict: subset-call
# at-fault: 0
# call: barrier
# within: 2
# ends: error
"""Rank 0 waits for the others before it tidies up; they do not know and leave."""

import torch

import hora.torch as hora

hora.init()
total = hora.allreduce(torch.ones(2), op=hora.Sum)
if hora.local_rank() == 0:
    hora.barrier()  # <- here
    print("all have ended, tidying up", total)
