# ranks: 3
# verdict: subset-call
# within: 2
# ends: error
"""One rank has nothing more to do and shuts down; the others reduce once more."""

import time

import torch

import hora.torch as hora

hora.init()
for _ in range(4):
    hora.allreduce(torch.ones(2), name="ones")
if hora.rank() == 2:
    hora.shutdown()
    time.sleep(5)
else:
    hora.allreduce(torch.ones(2), name="last")  # <- here
